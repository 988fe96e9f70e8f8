#pragma once
// The programs of a CUDA toolkit: nvcc, which compiles instead of NVRTC where it is asked for, and
// cuobjdump, which disassembles. They work on files in a temporary folder of their own.
#include <optional>
#include <string>
#include <vector>

namespace deep_ep::jit {

/// What `nvcc --version` prints, and the environment variables that add options to each run. Asked
/// once a path. Throws kUnsupported if there is no such program or it fails.
std::string nvcc_version(const std::string& nvcc);

struct NvccJob {
  const std::string& nvcc;
  const std::string& source;
  const std::vector<std::string>& options;
};

struct NvccOutput {
  std::string bytes;
  std::string log;
};

/// Compiles to a cubin. Throws kDevice with the compiler's messages, kUnsupported if it cannot be
/// run, kSystem.
NvccOutput nvcc_compile(const NvccJob& job);

/// Compiles to PTX; throws the same.
NvccOutput nvcc_compile_to_ptx(const NvccJob& job);

/// The disassembly of a cubin by cuobjdump: of the toolkit that `nvcc` belongs to, of CUDA_HOME,
/// CUDA_PATH, PATH or /usr/local/cuda. Throws kUnsupported if there is none or it fails.
std::string disassemble(const std::string& cubin, const std::optional<std::string>& nvcc);

}  // namespace deep_ep::jit
