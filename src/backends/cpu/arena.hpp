#pragma once
// Lends blocks of a window to tensors, and takes each back when its last reference dies.
//
// The window is a sparse file with far more address space than memory, so there is room for
// whatever fits the machine. Blocks lie as low as possible; pages below `num_kept_bytes` stay with
// the arena when their block comes back, so that a steady state touches no fresh page; pages above
// go back to the system.
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "backends/cpu/window.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::cpu {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// `begin` and `end` bound the arena in the window.
  Arena(std::shared_ptr<Window> window, std::int64_t begin, std::int64_t end,
        std::int64_t num_kept_bytes);

  /// A block of at least `num_bytes`, contents unspecified; null for no bytes.
  /// Throws kSystem when no gap is large enough: tensors that live hold the rest.
  std::shared_ptr<void> lend(std::int64_t num_bytes);

  /// The window offset of `address` if the whole range lies in this arena, else -1.
  std::int64_t offset_of(const void* address, std::int64_t num_bytes) const noexcept;

  /// Bytes that are lent now.
  std::int64_t num_lent_bytes() const;

  Tensor lend_matrix(std::int64_t num_rows, std::int64_t num_columns, DType dtype);
  Tensor lend_vector(std::int64_t num_elements, DType dtype);

 private:
  void take_back(std::int64_t offset, std::int64_t num_bytes) noexcept;

  const std::shared_ptr<Window> window_;
  const std::int64_t begin_, end_, kept_end_;
  const OwnerProcess owner_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> gaps_;  // offset -> bytes, never adjacent
  std::int64_t num_lent_bytes_ = 0;
};

}  // namespace deep_ep::cpu
