#include "backends/cuda/driver.hpp"

#include <dlfcn.h>

#include <memory>
#include <string>

#include "base/check.hpp"

namespace deep_ep::cuda {

namespace {

// The driver versions some functions by a suffix; the plain name would be an older signature.
template <typename Function>
void resolve(void* library, const char* name, Function& function) {
  void* const address = ::dlsym(library, name);
  if (address == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                concat("libcuda.so.1 has no ", name, ": update the NVIDIA driver"));
  }
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                concat("CUDA ranks need the NVIDIA driver: ", ::dlerror()));
  }
  Driver d{};
  resolve(library, "cuInit", d.cuInit);
  resolve(library, "cuDriverGetVersion", d.cuDriverGetVersion);
  resolve(library, "cuGetErrorName", d.cuGetErrorName);
  resolve(library, "cuGetErrorString", d.cuGetErrorString);
  resolve(library, "cuDeviceGetCount", d.cuDeviceGetCount);
  resolve(library, "cuDeviceGet", d.cuDeviceGet);
  resolve(library, "cuDeviceGetName", d.cuDeviceGetName);
  resolve(library, "cuDeviceGetAttribute", d.cuDeviceGetAttribute);
  resolve(library, "cuDeviceCanAccessPeer", d.cuDeviceCanAccessPeer);
  resolve(library, "cuDevicePrimaryCtxRetain", d.cuDevicePrimaryCtxRetain);
  resolve(library, "cuDevicePrimaryCtxRelease_v2", d.cuDevicePrimaryCtxRelease);
  resolve(library, "cuCtxGetCurrent", d.cuCtxGetCurrent);
  resolve(library, "cuCtxSetCurrent", d.cuCtxSetCurrent);
  resolve(library, "cuCtxEnablePeerAccess", d.cuCtxEnablePeerAccess);
  resolve(library, "cuCtxSynchronize", d.cuCtxSynchronize);
  resolve(library, "cuMemAlloc_v2", d.cuMemAlloc);
  resolve(library, "cuMemFree_v2", d.cuMemFree);
  resolve(library, "cuMemGetInfo_v2", d.cuMemGetInfo);
  resolve(library, "cuMemHostAlloc", d.cuMemHostAlloc);
  resolve(library, "cuMemFreeHost", d.cuMemFreeHost);
  resolve(library, "cuMemHostGetDevicePointer_v2", d.cuMemHostGetDevicePointer);
  resolve(library, "cuMemGetAllocationGranularity", d.cuMemGetAllocationGranularity);
  resolve(library, "cuMemCreate", d.cuMemCreate);
  resolve(library, "cuMemRelease", d.cuMemRelease);
  resolve(library, "cuMemExportToShareableHandle", d.cuMemExportToShareableHandle);
  resolve(library, "cuMemImportFromShareableHandle", d.cuMemImportFromShareableHandle);
  resolve(library, "cuMemAddressReserve", d.cuMemAddressReserve);
  resolve(library, "cuMemAddressFree", d.cuMemAddressFree);
  resolve(library, "cuMemMap", d.cuMemMap);
  resolve(library, "cuMemUnmap", d.cuMemUnmap);
  resolve(library, "cuMemSetAccess", d.cuMemSetAccess);
  resolve(library, "cuMemsetD8_v2", d.cuMemsetD8);
  resolve(library, "cuMemsetD8Async", d.cuMemsetD8Async);
  resolve(library, "cuMemcpyHtoD_v2", d.cuMemcpyHtoD);
  resolve(library, "cuMemcpyDtoH_v2", d.cuMemcpyDtoH);
  resolve(library, "cuMemcpyAsync", d.cuMemcpyAsync);
  resolve(library, "cuModuleLoadData", d.cuModuleLoadData);
  resolve(library, "cuModuleUnload", d.cuModuleUnload);
  resolve(library, "cuModuleGetFunction", d.cuModuleGetFunction);
  resolve(library, "cuFuncSetAttribute", d.cuFuncSetAttribute);
  resolve(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
          d.cuOccupancyMaxActiveBlocksPerMultiprocessor);
  resolve(library, "cuLaunchKernel", d.cuLaunchKernel);
  resolve(library, "cuStreamCreateWithPriority", d.cuStreamCreateWithPriority);
  resolve(library, "cuStreamDestroy_v2", d.cuStreamDestroy);
  resolve(library, "cuStreamQuery", d.cuStreamQuery);
  resolve(library, "cuStreamSynchronize", d.cuStreamSynchronize);
  resolve(library, "cuStreamWaitEvent", d.cuStreamWaitEvent);
  resolve(library, "cuStreamGetCaptureInfo_v2", d.cuStreamGetCaptureInfo);
  resolve(library, "cuUserObjectCreate", d.cuUserObjectCreate);
  resolve(library, "cuGraphRetainUserObject", d.cuGraphRetainUserObject);
  resolve(library, "cuEventCreate", d.cuEventCreate);
  resolve(library, "cuEventDestroy_v2", d.cuEventDestroy);
  resolve(library, "cuEventRecord", d.cuEventRecord);
  resolve(library, "cuEventQuery", d.cuEventQuery);
  resolve(library, "cuEventSynchronize", d.cuEventSynchronize);
  resolve(library, "cuEventElapsedTime", d.cuEventElapsedTime);
  if (const CUresult result = d.cuInit(0); result != kSuccess) {
    const char* text = nullptr;
    d.cuGetErrorString(result, &text);
    throw Error(ErrorCode::kUnsupported,
                concat("cuInit: ", text == nullptr ? "unknown error" : text, " (", result, ")"));
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = load();  // tried again after a failure
  return instance;
}

void check(CUresult result, const char* call) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  driver().cuGetErrorString(result, &text);
  throw Error(ErrorCode::kDevice,
              concat(call, ": ", text == nullptr ? "unknown error" : text, " (", result, ")"));
}

}  // namespace deep_ep::cuda
