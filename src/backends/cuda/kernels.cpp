#include "backends/cuda/kernels.hpp"

#include <utility>

#include "base/check.hpp"
#include "jit/jit.hpp"

namespace deep_ep::cuda {

namespace {

constexpr std::array<const char*, kNumKernels> kNames = {
    "ep_count", "ep_move", "ep_finish", "ep_combine_stage", "ep_combine", "ep_meet"};
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

}  // namespace

Kernels::Kernels(std::shared_ptr<const Device> device) : device_(std::move(device)) {
  const CurrentContext current(*device_);
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    const std::string name = kNames[i];
    const auto cubin = jit::compile({.tag = name,
                                     .source = concat("#include \"deep_ep/", name, ".cuh\"\n"),
                                     .arch = device_->architecture(),
                                     .extra_flags = {}});
    Loaded& loaded = kernels_[i];
    check(driver().cuModuleLoadData(&loaded.module, cubin->image.data()), "cuModuleLoadData");
    check(driver().cuModuleGetFunction(&loaded.function, loaded.module, name.c_str()),
          "cuModuleGetFunction");
  }
}

Kernels::~Kernels() {
  CUcontext before = nullptr;
  driver().cuCtxGetCurrent(&before);
  driver().cuCtxSetCurrent(device_->context());
  for (const Loaded& loaded : kernels_) {
    if (loaded.module != nullptr) driver().cuModuleUnload(loaded.module);
  }
  driver().cuCtxSetCurrent(before);
}

void Kernels::launch_raw(KernelId kernel, const LaunchShape& shape, CUstream stream,
                         const void* params) {
  Loaded& loaded = kernels_[static_cast<std::size_t>(kernel)];
  if (shape.shared_bytes > loaded.shared_bytes) {
    check(driver().cuFuncSetAttribute(loaded.function, kMaxDynamicSharedBytes, shape.shared_bytes),
          "cuFuncSetAttribute");
    loaded.shared_bytes = shape.shared_bytes;
  }
  void* arguments[] = {const_cast<void*>(params)};
  check(driver().cuLaunchKernel(loaded.function, static_cast<unsigned>(shape.num_blocks), 1, 1,
                                static_cast<unsigned>(shape.num_threads), 1, 1,
                                static_cast<unsigned>(shape.shared_bytes), stream, arguments,
                                nullptr),
        kNames[static_cast<std::size_t>(kernel)]);
}

}  // namespace deep_ep::cuda
