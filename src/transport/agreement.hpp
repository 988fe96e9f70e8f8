#pragma once
// All ranks succeed or all throw the same: for collective calls in which any rank can fail alone.
#include <exception>
#include <optional>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

/// The Error that `action` threw, nothing if it threw none. Other exceptions become kSystem: they
/// are those of the standard library, out of memory foremost.
template <typename Action>
std::optional<Error> error_of(const Action& action) {
  try {
    action();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kSystem, error.what());
  }
}

/// Throws one Error if any of the ranks, of which this holds the errors in rank order, has one.
/// Names each rank that failed; the code is that of a cause rather than that of its consequences.
void throw_if_any_failed(const std::vector<std::optional<Error>>& errors);

/// Collective: throw_if_any_failed() with the `own_error` of every rank.
void agree_on_success(Bootstrap& bootstrap, const std::optional<Error>& own_error);

}  // namespace deep_ep
