#pragma once
// The kernels, as text within the library: what the compiler finds when a source includes
// "deep_ep/…". cmake/embed_kernels.cmake puts them there at build time.
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::jit {

/// A file of the kernel tree. Both texts end with a null character, as C libraries want them.
struct EmbeddedFile {
  const char* name;  ///< as it is included: "deep_ep/ep_move.cuh"
  const char* text;
};

/// All files below kernels/deep_ep, ordered by name.
std::span<const EmbeddedFile> kernel_headers() noexcept;

/// The standard headers that NVRTC lacks; for no other compiler.
std::span<const EmbeddedFile> nvrtc_shims() noexcept;

/// "2.5.0"
std::string_view library_version() noexcept;

/// The files that hold kernels: those of kernels/deep_ep itself, as they are included.
std::vector<std::string> kernel_names();

}  // namespace deep_ep::jit
