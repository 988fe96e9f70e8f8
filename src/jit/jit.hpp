#pragma once
// Kernels compiled when they are first needed: from memory, from disk, from the compiler.
// Needs no GPU and loads nothing onto one.
#include <cstddef>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace deep_ep::jit {

/// What to compile. Equal specs under equal settings (EP_JIT_*) share one cubin.
struct KernelSpec {
  std::string tag;     ///< names the entry on disk; letters, digits and '_'
  std::string source;  ///< may include "deep_ep/…" of the embedded kernel tree, and <cstdint>
  std::string arch;    ///< as in -arch: "sm_90a"
  std::vector<std::string> extra_flags;
};

struct Cubin {
  std::vector<std::byte> image;
  std::string log;               ///< the compiler's, also of an earlier process; may be empty
  std::filesystem::path folder;  ///< of its files; empty if it is not on disk
};

/// What one process has compiled. Safe for threads. Entries live as long as it does.
class KernelCache {
 public:
  /// Threads that want the same wait for the first of them and get its result or its exception;
  /// others are not held up. A failure is forgotten, so that the next call tries again. Reads the
  /// environment and hashes the source even if it is known: keep the result, and not per launch.
  /// Throws kInvalidArgument for a bad tag, arch or variable, kUnsupported if there is no compiler
  /// or it does not know a flag, kDevice with the compiler's messages if it refuses the source.
  std::shared_ptr<const Cubin> compile(const KernelSpec& spec);

 private:
  using Result = std::shared_future<std::shared_ptr<const Cubin>>;

  std::mutex mutex_;
  std::unordered_map<std::string, Result> results_;  // by digest
};

/// The same of the cache that all of this process share.
std::shared_ptr<const Cubin> compile(const KernelSpec& spec);

}  // namespace deep_ep::jit
