#pragma once
// How a failed system call becomes an Error that names call, object and errno.
#include <cstring>
#include <string>

#include "base/check.hpp"

namespace deep_ep {

/// "ECONNREFUSED (111)": the name, because that is what manuals are searched for.
inline std::string errno_text(int error) {
  const char* const name = strerrorname_np(error);
  return concat(name != nullptr ? name : "unknown error", " (", error, ")");
}

/// Throws kSystem with "`call_and_object`: ENAME (number)". Pass errno first: it is then read
/// before anything else can change it.
template <typename... Args>
[[noreturn]] void throw_system_error(int error, const Args&... call_and_object) {
  throw Error(ErrorCode::kSystem, concat(call_and_object..., ": ", errno_text(error)));
}

}  // namespace deep_ep
