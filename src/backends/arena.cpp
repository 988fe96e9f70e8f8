#include "backends/arena.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.hpp"
#include "core/ep_routing.hpp"

namespace deep_ep {

Arena::Arena(ArenaMemory memory) : memory_(std::move(memory)) {
  gaps_.emplace(memory_.begin, memory_.end - memory_.begin);
}

std::shared_ptr<void> Arena::lend(std::int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  const std::int64_t size = align_up(num_bytes, memory_.block_bytes);
  std::int64_t offset = 0;
  {
    const std::scoped_lock lock(mutex_);
    const auto gap = std::ranges::find_if(gaps_, [&](const auto& g) { return g.second >= size; });
    if (gap == gaps_.end()) {
      throw Error(ErrorCode::kSystem,
                  concat("no room in the window for ", size, " bytes: tensors that live hold ",
                         num_lent_bytes_, " of ", memory_.end - memory_.begin));
    }
    offset = gap->first;
    if (gap->second > size) gaps_.emplace_hint(std::next(gap), offset + size, gap->second - size);
    gaps_.erase(gap);
    num_lent_bytes_ += size;
  }
  return {memory_.base + offset,
          [self = shared_from_this(), offset, size](void*) { self->take_back(offset, size); }};
}

void Arena::take_back(std::int64_t offset, std::int64_t num_bytes) noexcept {
  if (!owner_.is_current()) return;  // a forked child's copy: the memory is still its parent's
  const std::scoped_lock lock(mutex_);
  num_lent_bytes_ -= num_bytes;
  const std::int64_t surplus = std::max(offset, memory_.begin + memory_.num_kept_bytes);
  if (memory_.release && surplus < offset + num_bytes) {
    try {
      memory_.release(surplus, offset + num_bytes - surplus);
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
  if (byte < memory_.base + memory_.begin || byte > memory_.base + memory_.end) return -1;
  const std::int64_t offset = byte - memory_.base;
  return offset + num_bytes <= memory_.end ? offset : -1;
}

std::int64_t Arena::num_lent_bytes() const {
  const std::scoped_lock lock(mutex_);
  return num_lent_bytes_;
}

}  // namespace deep_ep
