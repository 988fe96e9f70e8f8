#pragma once
// What a call throws, to compare code and message in one expectation each.
#include <gtest/gtest.h>

#include <string>

#include "deep_ep/error.hpp"

namespace deep_ep::testing {

/// The Error that `action` throws; a test failure if it throws none.
template <typename Action>
Error error_from(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ErrorCode::kInternal, ""};
}

/// Whether `error` has this code, and this text in its message.
inline ::testing::AssertionResult is_error(const Error& error, ErrorCode code,
                                           const std::string& text) {
  const bool has_text = std::string(error.what()).find(text) != std::string::npos;
  if (error.code() == code && has_text) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "code " << static_cast<int>(error.code()) << " (expected " << static_cast<int>(code)
         << "), message: " << error.what() << " (expected in it: " << text << ")";
}

}  // namespace deep_ep::testing
