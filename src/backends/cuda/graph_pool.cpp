#include "backends/cuda/graph_pool.hpp"

#include <utility>
#include <vector>

namespace deep_ep::cuda {

namespace {

std::mutex dropped_mutex;
std::vector<std::shared_ptr<void>> dropped;

void drop_later(void* kept) {
  const std::unique_ptr<std::shared_ptr<void>> object(static_cast<std::shared_ptr<void>*>(kept));
  const std::scoped_lock lock(dropped_mutex);
  dropped.push_back(std::move(*object));
}

}  // namespace

std::shared_ptr<void> GraphPool::lend(std::int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  std::shared_ptr<void> block;
  std::int64_t size = num_bytes;
  {
    const std::scoped_lock lock(mutex_);
    // A much larger block is worth more to another tensor.
    const auto found = free_.lower_bound(num_bytes);
    if (found != free_.end() && found->first <= 2 * num_bytes) {
      size = found->first;
      block = std::move(found->second);
      free_.erase(found);
    }
  }
  if (block == nullptr) block = arena_->lend(num_bytes);
  void* const address = block.get();
  return {address, [pool = weak_from_this(), size, block = std::move(block)](void*) mutable {
            const auto alive = pool.lock();
            if (alive == nullptr) return;  // the block returns to the arena
            const std::scoped_lock lock(alive->mutex_);
            alive->free_.emplace(size, std::move(block));
          }};
}

void keep_with_graph(CUgraph graph, std::shared_ptr<void> object) {
  constexpr unsigned kNoDestructorSync = 1, kMove = 1;
  auto kept = std::make_unique<std::shared_ptr<void>>(std::move(object));
  CUuserObject user_object = nullptr;
  check(driver().cuUserObjectCreate(&user_object, kept.get(), drop_later, 1, kNoDestructorSync),
        "cuUserObjectCreate");
  static_cast<void>(kept.release());
  check(driver().cuGraphRetainUserObject(graph, user_object, 1, kMove), "cuGraphRetainUserObject");
}

void drop_what_graphs_kept() {
  std::vector<std::shared_ptr<void>> objects;
  const std::scoped_lock lock(dropped_mutex);
  objects.swap(dropped);
}

}  // namespace deep_ep::cuda
