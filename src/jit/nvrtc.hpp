#pragma once
// NVRTC, NVIDIA's compiler as a library: found when first used, so that neither building nor
// importing this library needs it. The only file that calls it.
#include <span>
#include <string>
#include <vector>

#include "jit/kernel_sources.hpp"

namespace deep_ep::jit {

/// Name and version, "nvrtc 13.0 (109338064 bytes)"; the size tells builds of one version apart.
/// Throws kUnsupported if there is no usable NVRTC, and says where it was looked for.
std::string nvrtc_version();

struct NvrtcJob {
  const std::string& source;
  std::span<const EmbeddedFile> headers;  ///< what it may include
  const std::vector<std::string>& options;
};

struct NvrtcOutput {
  std::string cubin;
  std::string ptx;
  std::string log;
};

/// Compiles for the machine that the options name. Throws kDevice with the compiler's messages
/// for a source that it refuses, kUnsupported for an option, or if there is no usable NVRTC.
NvrtcOutput nvrtc_compile(const NvrtcJob& job);

}  // namespace deep_ep::jit
