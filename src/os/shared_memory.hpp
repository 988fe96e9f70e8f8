#pragma once
// Memory that several processes map: an anonymous file, its mappings, and giving its pages back.
#include <cstddef>
#include <cstdint>
#include <span>

#include "os/fd.hpp"

namespace deep_ep {

/// An anonymous file of `num_bytes` zero bytes for others to map; it vanishes with its last
/// descriptor and mapping. Sparse: a page takes memory once it is touched. Its size is sealed, so
/// no process that maps it can be made to fault by a peer that truncates it. `name` shows in /proc
/// only. Throws kInvalidArgument, kSystem.
UniqueFd create_shared_memory(const char* name, std::int64_t num_bytes);

/// Gives the whole pages of [offset, offset + num_bytes) back to the system; the range then reads
/// as zeros in every mapping. Throws kInvalidArgument, kSystem.
void release_pages(int fd, std::int64_t offset, std::int64_t num_bytes);

/// Where a mapping is; owns nothing.
struct MappedRange {
  void* data = nullptr;
  std::size_t num_bytes = 0;
  bool operator==(const MappedRange&) const = default;
};

struct MappingTraits {
  using Handle = MappedRange;
  static constexpr Handle kNull{};
  static void close(Handle handle) noexcept;
};

/// A shared read-write mapping of a file from its start. Keeps the memory after the descriptor is
/// closed.
class Mapping {
 public:
  Mapping() noexcept = default;

  /// Throws kInvalidArgument unless `num_bytes` is positive and the file is at least as long (a
  /// touch beyond its end would kill the process), kSystem if the kernel says no.
  Mapping(int fd, std::int64_t num_bytes);

  std::byte* data() const noexcept { return static_cast<std::byte*>(handle_.get().data); }
  std::int64_t num_bytes() const noexcept {
    return static_cast<std::int64_t>(handle_.get().num_bytes);
  }
  std::span<std::byte> bytes() const noexcept { return {data(), handle_.get().num_bytes}; }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

 private:
  Unique<MappingTraits> handle_;
};

}  // namespace deep_ep
