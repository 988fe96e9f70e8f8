#include "backends/cpu/network.hpp"

#include <cstring>

namespace deep_ep::cpu {

void LoopbackNetwork::put(int rank_idx, std::int64_t window_offset, const void* source,
                          std::int64_t num_bytes) {
  std::memcpy(ranks_.window(rank_idx).at(window_offset), source,
              static_cast<std::size_t>(num_bytes));
}

void LoopbackNetwork::signal(int rank_idx, NetworkSignal signal, std::uint64_t call) {
  const int own_node = ranks_.topology().scaleout_rank_idx();
  post(ranks_.window(rank_idx).inbox(own_node).signals[static_cast<std::size_t>(signal)], call);
}

}  // namespace deep_ep::cpu
