#pragma once
// Where the tensors of a test lie: for CUDA ranks on the GPU, with copies to and from the host; for
// CPU ranks everything stays where it is.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/device.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::testing {

/// Why tests on GPUs cannot run here; empty if they can.
inline std::string why_no_gpu() {
  try {
    // Kept: a context that nobody holds is made anew by each test, which takes longer than the
    // test.
    static const cuda::Device device(0);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

/// Memory of one rank, and its stream. Copies live as long as it does.
class DeviceMemory {
 public:
  explicit DeviceMemory(int cuda_device) {
    if (cuda_device == kHostMemory) return;
    device_ = std::make_unique<cuda::Device>(cuda_device);
    const cuda::CurrentContext current(*device_);
    constexpr unsigned kNonBlocking = 1;
    cuda::check(cuda::driver().cuStreamCreateWithPriority(&stream_, kNonBlocking, 0),
                "cuStreamCreateWithPriority");
  }
  ~DeviceMemory() {
    if (!device_) return;
    const cuda::CurrentContext current(*device_);
    cuda::driver().cuCtxSynchronize();
    for (const cuda::CUdeviceptr address : copies_) cuda::driver().cuMemFree(address);
    cuda::driver().cuStreamDestroy(stream_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  bool is_host() const noexcept { return device_ == nullptr; }
  void* stream() const noexcept { return stream_; }

  /// `view` with its elements in the rank's memory.
  TensorView upload(TensorView view) {
    if (is_host() || !view.is_given()) return view;
    const cuda::CurrentContext current(*device_);
    const std::size_t num_bytes = extent(view);
    cuda::CUdeviceptr address = 0;
    cuda::check(cuda::driver().cuMemAlloc(&address, num_bytes == 0 ? 1 : num_bytes), "cuMemAlloc");
    copies_.push_back(address);
    copy_in(reinterpret_cast<void*>(address), view.data, num_bytes);
    view.data = reinterpret_cast<void*>(address);
    view.cuda_device = device_->ordinal();
    return view;
  }

  /// Copies host memory to memory of the rank.
  void copy_in(void* target, const void* source, std::size_t num_bytes) const {
    if (num_bytes == 0) return;
    if (is_host()) {
      std::memcpy(target, source, num_bytes);
      return;
    }
    const cuda::CurrentContext current(*device_);
    cuda::check(
        cuda::driver().cuMemcpyHtoD(reinterpret_cast<cuda::CUdeviceptr>(target), source, num_bytes),
        "cuMemcpyHtoD");
  }

  /// A tensor whose elements the host can read.
  Tensor download(const Tensor& tensor) const {
    if (is_host() || tensor.view.num_elements() == 0) return tensor;
    const cuda::CurrentContext current(*device_);
    const std::size_t num_bytes = extent(tensor.view);
    auto copy = std::make_shared<std::vector<std::byte>>(num_bytes);
    cuda::check(cuda::driver().cuMemcpyDtoH(
                    copy->data(), reinterpret_cast<cuda::CUdeviceptr>(tensor.view.data), num_bytes),
                "cuMemcpyDtoH");
    Tensor result = tensor;
    result.view.data = copy->data();
    result.view.cuda_device = kHostMemory;
    result.storage = std::shared_ptr<void>(copy, copy->data());
    return result;
  }

 private:
  static std::size_t extent(const TensorView& view) {
    if (view.num_elements() == 0) return 0;
    const std::int64_t last =
        (view.shape[0] - 1) * view.strides[0] + (view.shape[1] - 1) * view.strides[1];
    return static_cast<std::size_t>((last + 1) * size_of(view.dtype));
  }

  std::unique_ptr<cuda::Device> device_;
  cuda::CUstream stream_ = nullptr;
  std::vector<cuda::CUdeviceptr> copies_;
};

}  // namespace deep_ep::testing
