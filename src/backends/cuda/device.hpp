#pragma once
// One GPU: its primary context, which this library shares with everything else in the process, and
// what decides how kernels are launched.
#include <string>

#include "backends/cuda/driver.hpp"

namespace deep_ep::cuda {

class Device {
 public:
  /// Throws kUnsupported without a driver, kInvalidArgument if there is no such GPU.
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const noexcept { return ordinal_; }
  CUcontext context() const noexcept { return context_; }
  int num_sms() const noexcept { return num_sms_; }
  /// Most dynamic shared memory of a block, in bytes.
  int max_shared_bytes() const noexcept { return max_shared_bytes_; }
  /// What kernels are compiled for, e.g. "sm_90a".
  std::string architecture() const;
  bool has_bulk_copies() const noexcept { return major_ >= 9; }

 private:
  int attribute(DeviceAttribute attribute) const;

  int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int num_sms_ = 0, max_shared_bytes_ = 0, major_ = 0, minor_ = 0;
};

/// Makes a context current on this thread while it lives.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  explicit CurrentContext(const Device& device) : CurrentContext(device.context()) {}
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  CUcontext before_ = nullptr;
  bool is_changed_ = false;
};

}  // namespace deep_ep::cuda
