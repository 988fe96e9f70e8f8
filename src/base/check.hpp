#pragma once
// require(): the one way to refuse bad input, and text built from values.
#include <source_location>
#include <sstream>
#include <string>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// The arguments written one after another, as operator<< writes them.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  return text.str();
}

/// Throws kInvalidArgument with the concatenated message unless `condition` holds.
template <typename... Args>
void require(bool condition, const Args&... message) {
  if (!condition) [[unlikely]] {
    throw Error(ErrorCode::kInvalidArgument, concat(message...));
  }
}

/// Throws kInternal unless `condition` holds: a bug of the library, not of its caller.
inline void internal_check(bool condition, const char* what,
                           std::source_location where = std::source_location::current()) {
  if (!condition) [[unlikely]] {
    throw Error(ErrorCode::kInternal,
                concat("internal error: ", what, " (", where.file_name(), ":", where.line(), ")"));
  }
}

}  // namespace deep_ep
