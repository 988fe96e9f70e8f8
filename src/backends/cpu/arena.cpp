#include "backends/cpu/arena.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.hpp"

namespace deep_ep::cpu {

namespace {

constexpr std::int64_t kPageBytes = 4096;  // blocks own whole pages, so that they can be given back

}  // namespace

Arena::Arena(std::shared_ptr<Window> window, std::int64_t begin, std::int64_t end,
             std::int64_t num_kept_bytes)
    : window_(std::move(window)), begin_(begin), end_(end), kept_end_(begin + num_kept_bytes) {
  gaps_.emplace(begin, end - begin);
}

std::shared_ptr<void> Arena::lend(std::int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const std::int64_t size = align_up(num_bytes, kPageBytes);
  std::int64_t offset = 0;
  {
    const std::scoped_lock lock(mutex_);
    const auto gap = std::ranges::find_if(gaps_, [&](const auto& g) { return g.second >= size; });
    if (gap == gaps_.end()) {
      throw Error(ErrorCode::kSystem,
                  concat("no room in the window for ", size, " bytes: tensors that live hold ",
                         num_lent_bytes_, " of ", end_ - begin_));
    }
    offset = gap->first;
    if (gap->second > size) gaps_.emplace_hint(std::next(gap), offset + size, gap->second - size);
    gaps_.erase(gap);
    num_lent_bytes_ += size;
  }
  return {window_->at(offset),
          [self = shared_from_this(), offset, size](void*) { self->take_back(offset, size); }};
}

void Arena::take_back(std::int64_t offset, std::int64_t num_bytes) noexcept {
  if (!owner_.is_current()) return;  // a forked child's copy: the memory is still its parent's
  const std::scoped_lock lock(mutex_);
  num_lent_bytes_ -= num_bytes;
  const std::int64_t surplus = std::max(offset, kept_end_);
  if (surplus < offset + num_bytes) {
    try {
      release_pages(window_->fd(), surplus, offset + num_bytes - surplus);
    } catch (const Error&) {
      // The pages stay: more memory than promised, and nothing else is wrong.
    }
  }
  auto next = gaps_.upper_bound(offset);
  if (next != gaps_.end() && next->first == offset + num_bytes) {
    num_bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += num_bytes;
      return;
    }
  }
  gaps_.emplace_hint(next, offset, num_bytes);
}

std::int64_t Arena::offset_of(const void* address, std::int64_t num_bytes) const noexcept {
  const auto* byte = static_cast<const std::byte*>(address);
  if (byte < window_->at(begin_) || byte > window_->at(end_)) return -1;
  const std::int64_t offset = byte - window_->at(0);
  return offset + num_bytes <= end_ ? offset : -1;
}

std::int64_t Arena::num_lent_bytes() const {
  const std::scoped_lock lock(mutex_);
  return num_lent_bytes_;
}

Tensor Arena::lend_matrix(std::int64_t num_rows, std::int64_t num_columns, DType dtype) {
  std::shared_ptr<void> block = lend(num_rows * num_columns * size_of(dtype));
  return {TensorView::matrix(block.get(), dtype, num_rows, num_columns), std::move(block)};
}

Tensor Arena::lend_vector(std::int64_t num_elements, DType dtype) {
  std::shared_ptr<void> block = lend(num_elements * size_of(dtype));
  return {TensorView::vector(block.get(), dtype, num_elements), std::move(block)};
}

}  // namespace deep_ep::cpu
