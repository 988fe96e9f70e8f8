#include "backends/cpu/window.hpp"

#include <utility>

#include "base/check.hpp"

namespace deep_ep::cpu {

Window::Window(const WindowLayout& layout, UniqueFd fd, Mapping mapping)
    : layout_(layout), fd_(std::move(fd)), mapping_(std::move(mapping)) {}

std::shared_ptr<Window> Window::create(const WindowLayout& layout, std::int64_t num_bytes) {
  UniqueFd fd = create_shared_memory("deep_ep_window", num_bytes);
  Mapping mapping(fd.get(), num_bytes);
  return std::shared_ptr<Window>(new Window(layout, std::move(fd), std::move(mapping)));
}

std::shared_ptr<Window> Window::map(const WindowLayout& layout, int fd, std::int64_t num_bytes) {
  return std::shared_ptr<Window>(new Window(layout, UniqueFd(), Mapping(fd, num_bytes)));
}

std::byte* Window::lent_at(std::int64_t offset, std::int64_t num_bytes, int rank_idx) const {
  if (offset == -1) return nullptr;
  if (offset < layout_.arena || num_bytes > this->num_bytes() ||
      offset > this->num_bytes() - num_bytes) {
    throw Error(ErrorCode::kPeer,
                concat("rank ", rank_idx, " offered ", num_bytes, " bytes at ", offset,
                       ", which are not in its window of ", this->num_bytes()));
  }
  return at(offset);
}

std::shared_ptr<Arena> make_arena(std::shared_ptr<Window> window, std::int64_t begin,
                                  std::int64_t end, std::int64_t num_kept_bytes) {
  constexpr std::int64_t kPageBytes = 4096;  // blocks own whole pages, so that they can be released
  const int fd = window->fd();
  std::byte* const base = window->at(0);
  return std::make_shared<Arena>(
      ArenaMemory{.base = base,
                  .begin = begin,
                  .end = end,
                  .block_bytes = kPageBytes,
                  .owner = std::move(window),
                  .release = [fd](std::int64_t offset,
                                  std::int64_t num_bytes) { release_pages(fd, offset, num_bytes); },
                  .num_kept_bytes = num_kept_bytes});
}

}  // namespace deep_ep::cpu
