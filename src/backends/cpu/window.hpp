#pragma once
// Memory of one rank that every rank of its domain can address.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backends/arena.hpp"
#include "backends/cpu/window_layout.hpp"
#include "os/fd.hpp"
#include "os/process.hpp"
#include "os/shared_memory.hpp"

namespace deep_ep::cpu {

/// A mapped window: this rank's own or a peer's. Kept alive by the buffer and by every tensor lent
/// from it.
class Window {
 public:
  /// Makes a window of `num_bytes`; sparse, so a byte takes memory when it is first written.
  static std::shared_ptr<Window> create(const WindowLayout& layout, std::int64_t num_bytes);
  /// Maps a peer's window; pages are mapped as they are touched. `fd` is not needed afterwards.
  static std::shared_ptr<Window> map(const WindowLayout& layout, int fd, std::int64_t num_bytes);

  int fd() const noexcept { return fd_.get(); }  ///< of the own window
  std::int64_t num_bytes() const noexcept { return mapping_.num_bytes(); }
  const WindowLayout& layout() const noexcept { return layout_; }
  std::byte* at(std::int64_t offset) const noexcept { return mapping_.data() + offset; }

  /// The memory that rank `rank_idx` offered at `offset`, null for -1. Throws kPeer unless the
  /// range lies in the arena: the offset is what a peer wrote.
  std::byte* lent_at(std::int64_t offset, std::int64_t num_bytes, int rank_idx) const;

  Control& control() const noexcept { return *reinterpret_cast<Control*>(at(layout_.control)); }
  Inbox& inbox(int node) const noexcept {
    return *reinterpret_cast<Inbox*>(at(layout_.inbox(node)));
  }
  Offer& offer(std::uint64_t call) const noexcept {
    return *reinterpret_cast<Offer*>(at(layout_.offer(call)));
  }
  std::span<std::byte> message(std::uint64_t call) const noexcept {
    return {at(layout_.message(call)), static_cast<std::size_t>(layout_.message_bytes)};
  }
  std::span<std::byte> inbox_message(int node, std::uint64_t call) const noexcept {
    return {at(layout_.inbox_message(node, call)), static_cast<std::size_t>(layout_.message_bytes)};
  }

 private:
  Window(const WindowLayout& layout, UniqueFd fd, Mapping mapping);

  WindowLayout layout_;
  UniqueFd fd_;
  Mapping mapping_;
};

/// Lends [begin, end) of a window; pages beyond the first `num_kept_bytes` go back to the system
/// with their block.
std::shared_ptr<Arena> make_arena(std::shared_ptr<Window> window, std::int64_t begin,
                                  std::int64_t end, std::int64_t num_kept_bytes);

}  // namespace deep_ep::cpu
