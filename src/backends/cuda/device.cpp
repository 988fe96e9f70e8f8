#include "backends/cuda/device.hpp"

#include "base/check.hpp"

namespace deep_ep::cuda {

Device::Device(int ordinal) : ordinal_(ordinal) {
  int num_devices = 0;
  check(driver().cuDeviceGetCount(&num_devices), "cuDeviceGetCount");
  require(ordinal >= 0 && ordinal < num_devices, "cuda_device must be below the ", num_devices,
          " GPUs that this process sees, got ", ordinal);
  check(driver().cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  num_sms_ = attribute(DeviceAttribute::kMultiprocessorCount);
  max_shared_bytes_ = attribute(DeviceAttribute::kMaxSharedMemoryPerBlockOptin);
  major_ = attribute(DeviceAttribute::kComputeCapabilityMajor);
  minor_ = attribute(DeviceAttribute::kComputeCapabilityMinor);
  if (major_ < 8) {
    throw Error(ErrorCode::kUnsupported,
                concat("cuda:", ordinal, " has compute capability ", major_, ".", minor_,
                       ": CUDA ranks need 8.0 or later"));
  }
  check(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() { driver().cuDevicePrimaryCtxRelease(device_); }

int Device::attribute(DeviceAttribute attribute) const {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, static_cast<int>(attribute), device_),
        "cuDeviceGetAttribute");
  return value;
}

std::string Device::architecture() const {
  // Features of one architecture alone, which later ones need not have.
  const bool has_specific = major_ == 9 || major_ == 10 || major_ == 12;
  return concat("sm_", major_, minor_, has_specific ? "a" : "");
}

CurrentContext::CurrentContext(CUcontext context) {
  check(driver().cuCtxGetCurrent(&before_), "cuCtxGetCurrent");
  if (before_ == context) return;
  check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent");
  is_changed_ = true;
}

CurrentContext::~CurrentContext() {
  if (is_changed_) driver().cuCtxSetCurrent(before_);
}

}  // namespace deep_ep::cuda
