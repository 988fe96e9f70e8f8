#pragma once
// The kernels of the EP buffer on one GPU: compiled for it, loaded, and ready to launch.
#include <array>
#include <memory>

#include "backends/cuda/device.hpp"

namespace deep_ep::cuda {

enum class KernelId { kCount, kMove, kFinish, kCombineStage, kCombine, kMeet };
inline constexpr int kNumKernels = 6;
inline constexpr int kWarp = 32;  ///< threads

/// The size of a launch.
struct LaunchShape {
  int num_blocks = 1;
  int num_threads = 32;
  int shared_bytes = 0;  ///< dynamic
};

class Kernels {
 public:
  /// Compiles what no cache holds, which may take seconds.
  explicit Kernels(std::shared_ptr<const Device> device);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  /// Puts a kernel on `stream`; `params` is its one argument, which is copied.
  template <typename Params>
  void launch(KernelId kernel, const LaunchShape& shape, CUstream stream, const Params& params) {
    launch_raw(kernel, shape, stream, &params);
    ++num_launches_;
  }

  /// How many kernels were put on streams so far.
  std::uint64_t num_launches() const noexcept { return num_launches_; }

 private:
  struct Loaded {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    int shared_bytes = 48 << 10;  // what it may have now
  };
  void launch_raw(KernelId kernel, const LaunchShape& shape, CUstream stream, const void* params);

  std::shared_ptr<const Device> device_;
  std::array<Loaded, kNumKernels> kernels_;
  std::uint64_t num_launches_ = 0;
};

}  // namespace deep_ep::cuda
