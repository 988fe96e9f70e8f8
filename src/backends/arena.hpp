#pragma once
// Lends blocks of a window to tensors, and takes each back when its last reference dies.
//
// Blocks lie as low as possible. What becomes of memory beyond `num_kept_bytes` when its block
// comes back, the owner of the memory says: pages of a sparse file go back to the system, so that a
// steady state touches no fresh page and an exception costs nothing for long.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "backends/lender.hpp"
#include "os/process.hpp"

namespace deep_ep {

/// Memory that an arena lends.
struct ArenaMemory {
  std::byte* base = nullptr;  ///< of the window
  std::int64_t begin = 0;     ///< offsets in the window that bound the arena
  std::int64_t end = 0;
  std::int64_t block_bytes = 0;  ///< blocks start at multiples of this; a power of two
  int cuda_device = kHostMemory;
  std::shared_ptr<void> owner;  ///< kept as long as a block is lent
  /// Gives [offset, offset + num_bytes) of the window back to the system; may be empty.
  std::function<void(std::int64_t offset, std::int64_t num_bytes)> release;
  std::int64_t num_kept_bytes = 0;  ///< from `begin`; only what lies beyond is released
};

class Arena : public Lender, public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(ArenaMemory memory);

  /// Throws kSystem when no gap is large enough: tensors that live hold the rest.
  std::shared_ptr<void> lend(std::int64_t num_bytes) override;

  int cuda_device() const noexcept override { return memory_.cuda_device; }

  /// The window offset of `address` if the whole range lies in this arena, else -1.
  std::int64_t offset_of(const void* address, std::int64_t num_bytes) const noexcept;

  /// Bytes that are lent now.
  std::int64_t num_lent_bytes() const;

 private:
  void take_back(std::int64_t offset, std::int64_t num_bytes) noexcept;

  const ArenaMemory memory_;
  const OwnerProcess owner_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> gaps_;  // offset -> bytes, never adjacent
  std::int64_t num_lent_bytes_ = 0;
};

}  // namespace deep_ep
