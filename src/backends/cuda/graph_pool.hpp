#pragma once
// Memory for calls that are captured into graphs: a replay uses the addresses of the capture, so
// blocks that come back stay reserved for graphs until all of a buffer's graphs are gone.
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "backends/arena.hpp"
#include "backends/cuda/driver.hpp"

namespace deep_ep::cuda {

/// Lends blocks of an arena. Blocks that come back are lent again, to this graph or another one of
/// the same buffer, whose calls never run at a time; they return to the arena with the pool.
class GraphPool : public Lender, public std::enable_shared_from_this<GraphPool> {
 public:
  explicit GraphPool(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  std::shared_ptr<void> lend(std::int64_t num_bytes) override;
  int cuda_device() const noexcept override { return arena_->cuda_device(); }

 private:
  std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::multimap<std::int64_t, std::shared_ptr<void>> free_;  // by size in bytes
};

/// Keeps an object as long as a graph, or anything that was made from it, lives. It is dropped by a
/// later drop_what_graphs_kept(): a graph that dies may not call the driver.
void keep_with_graph(CUgraph graph, std::shared_ptr<void> object);
void drop_what_graphs_kept();

}  // namespace deep_ep::cuda
