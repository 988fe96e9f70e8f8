#pragma once
// Compiled kernels on disk, shared by processes and hosts: an entry is there whole or not at all.
//
// <root>/cache/<name>/  kernel.cubin, what else the compilation left, and .committed, which is
//                       written last and holds the size and the digest of the cubin
// <root>/tmp/<id>/      an entry being written; one rename makes it an entry of the cache
// <root>/tmp/<name>.lock  held by who compiles <name>, so that the ranks of a host do it once
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "os/fd.hpp"

namespace deep_ep::jit {

struct CacheEntry {
  std::filesystem::path folder;
  std::string cubin;
  std::string log;  ///< empty if it was not kept
};

/// Held while an entry is compiled. Ends with the process at the latest.
class CompileLock {
 public:
  CompileLock() = default;
  CompileLock(UniqueFd fd, std::filesystem::path path);
  CompileLock(CompileLock&&) = default;
  CompileLock& operator=(CompileLock&&) = delete;
  ~CompileLock();

  bool is_held() const noexcept { return static_cast<bool>(fd_); }

 private:
  UniqueFd fd_;
  std::filesystem::path path_;
};

class DiskCache {
 public:
  using File = std::pair<std::string, std::string>;  ///< name and bytes

  /// All roots are searched, in this order; the first one is written.
  explicit DiskCache(std::vector<std::filesystem::path> roots) : roots_(std::move(roots)) {}

  /// The entry; nothing if it is absent or damaged in all roots.
  std::optional<CacheEntry> find(const std::string& name) const;

  /// Waits until nobody else of this host compiles `name`, at most `timeout`. Without it, or where
  /// a lock cannot be had, it is not held: the same is then compiled twice, which does no harm.
  CompileLock lock(const std::string& name, std::chrono::nanoseconds timeout) const;

  /// Adds the entry `name` of these files, one of them "kernel.cubin", unless another process was
  /// first. Returns its folder. Throws kSystem, also if there is no root.
  std::filesystem::path store(const std::string& name, const std::vector<File>& files) const;

 private:
  std::vector<std::filesystem::path> roots_;
};

}  // namespace deep_ep::jit
