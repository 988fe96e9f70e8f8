#pragma once
// Which rank sits where: scale-up domains (load/store reach) side by side in a scale-out domain.
#include <string>
#include <vector>

namespace deep_ep {

/// The place of one rank. `rank_idx == scaleout_rank_idx * num_scaleup_ranks + scaleup_rank_idx`.
struct Topology {
  int rank_idx = 0;
  int num_ranks = 1;
  int num_scaleout_ranks = 1;  ///< number of domains that the routing tells apart
  int num_scaleup_ranks = 1;   ///< ranks in each of them

  int scaleout_rank_idx() const noexcept { return rank_idx / num_scaleup_ranks; }
  int scaleup_rank_idx() const noexcept { return rank_idx % num_scaleup_ranks; }
  int rank_at(int scaleout_idx, int scaleup_idx) const noexcept {
    return scaleout_idx * num_scaleup_ranks + scaleup_idx;
  }
  bool is_hybrid() const noexcept { return num_scaleout_ranks > 1; }
};

/// The physical topology of a group from the host identity of each of its ranks, in rank order.
/// Throws kUnsupported unless the ranks of a host are neighbours and all hosts have equally many.
Topology topology_from_host_ids(int rank_idx, const std::vector<std::string>& host_ids);

/// The topology that the routing uses: the physical one when hybrid mode is allowed, else one
/// domain.
Topology logical_topology(const Topology& physical, bool allow_hybrid_mode) noexcept;

}  // namespace deep_ep
