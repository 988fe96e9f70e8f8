#pragma once
// From kernel source to cubin: the options of this process, NVRTC or nvcc, and the checks after it.
#include <string>
#include <vector>

#include "base/config.hpp"

namespace deep_ep::jit {

/// All that decides what a source compiles to.
struct CompilePlan {
  config::JitSettings settings;
  std::string compiler;            ///< name and version, and what its environment adds
  std::vector<std::string> flags;  ///< all but those that name files
};

/// Chooses compiler and flags. `arch` is as in -arch: "sm_90a". Throws kInvalidArgument for another
/// form of it, kUnsupported if there is no compiler.
CompilePlan plan_compile(const config::JitSettings& settings, const std::string& arch,
                         const std::vector<std::string>& extra_flags);

/// The command as a person would type it, without the names of files.
std::string command_of(const CompilePlan& plan);

struct CompileOutput {
  std::string cubin;
  std::string log;
  std::string ptx;   ///< empty unless the settings want it
  std::string sass;  ///< the same
};

/// Compiles; the source may include the embedded kernel tree. Throws kDevice with the compiler's
/// messages if it refuses the source, or if the settings forbid spills or local memory and the
/// kernel has some; kUnsupported for flags it does not know, or if the settings want a disassembly
/// and there is no cuobjdump; kSystem.
CompileOutput compile_cubin(const CompilePlan& plan, const std::string& source);

}  // namespace deep_ep::jit
