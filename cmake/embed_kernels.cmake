# Writes ${OUTPUT}, a C++ source that holds the kernel tree below ${KERNELS} as text.
# Run at build time: cmake -DKERNELS=… -DVERSION=… -DOUTPUT=… -P embed_kernels.cmake

# A definition of `function` that lists the files below `folder` by their names from there. `prefix`
# goes before each name.
function(embed function folder prefix)
  set(num_files 0)
  set(entries "")
  foreach(name IN LISTS ARGN)
    file(READ "${folder}/${name}" text)
    if(text MATCHES "\\)kernel\"")
      message(FATAL_ERROR "${folder}/${name} must not hold )kernel\", which ends its embedded text")
    endif()
    string(APPEND entries "    {\"${prefix}${name}\", R\"kernel(${text})kernel\"},\n")
    math(EXPR num_files "${num_files} + 1")
  endforeach()
  string(APPEND definitions "
std::span<const EmbeddedFile> ${function}() noexcept {
  static constexpr std::array<EmbeddedFile, ${num_files}> kFiles{{
${entries}  }};
  return kFiles;
}
")
  set(definitions "${definitions}" PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE headers LIST_DIRECTORIES false RELATIVE "${KERNELS}/deep_ep"
     "${KERNELS}/deep_ep/*.cuh" "${KERNELS}/deep_ep/*.hpp")
file(GLOB shims RELATIVE "${KERNELS}/nvrtc_shim" "${KERNELS}/nvrtc_shim/*")
set(definitions "")
embed(kernel_headers "${KERNELS}/deep_ep" "deep_ep/" ${headers})
embed(nvrtc_shims "${KERNELS}/nvrtc_shim" "" ${shims})

file(WRITE "${OUTPUT}" "// Made by cmake/embed_kernels.cmake.
#include <array>

#include \"jit/kernel_sources.hpp\"

namespace deep_ep::jit {

std::string_view library_version() noexcept { return \"${VERSION}\"; }
${definitions}
}  // namespace deep_ep::jit
")
