#pragma once
// The one exception type of the library, and what kind of failure it reports.
#include <stdexcept>
#include <string>

namespace deep_ep {

/// What a caller can do about an Error. Python sees the exception named behind each.
enum class ErrorCode {
  kInvalidArgument,  ///< fix the call (ValueError)
  kUnsupported,      ///< this build or machine cannot do it (NotImplementedError)
  kSystem,           ///< the operating system said no (OSError)
  kPeer,             ///< another rank refused the call, left or died (RuntimeError)
  kTimeout,          ///< another rank did not come within the limit (TimeoutError)
  kDevice,           ///< the GPU's driver or compiler said no (RuntimeError)
  kInternal,         ///< a bug of this library (RuntimeError)
};

/// Thrown by every function of the library that fails.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace deep_ep
