#include "deep_ep/topology.hpp"

#include <cstddef>
#include <set>

#include "base/check.hpp"

namespace deep_ep {
namespace {

/// Throws kUnsupported unless `condition` holds.
template <typename... Args>
void require_supported(bool condition, const Args&... message) {
  if (!condition) throw Error(ErrorCode::kUnsupported, concat(message...));
}

}  // namespace

Topology topology_from_host_ids(int rank_idx, const std::vector<std::string>& host_ids) {
  const std::size_t num_ranks = host_ids.size();
  require(rank_idx >= 0 && static_cast<std::size_t>(rank_idx) < num_ranks,
          "rank_idx must be in 0..num_ranks-1, got ", rank_idx, " with ", num_ranks, " ranks");

  std::set<std::string> hosts;
  std::size_t ranks_per_host = 0;
  for (std::size_t begin = 0, end = 0; begin < num_ranks; begin = end) {
    while (end < num_ranks && host_ids[end] == host_ids[begin]) ++end;
    require_supported(hosts.insert(host_ids[begin]).second,
                      "the ranks of a host must be neighbours, but rank ", begin,
                      " is apart from other ranks of its host ", host_ids[begin]);
    if (begin == 0) ranks_per_host = end;
    require_supported(end - begin == ranks_per_host,
                      "all hosts must have equally many ranks, but host ", host_ids[begin],
                      " has ranks ", begin, "..", end - 1, " and host ", host_ids[0], " has ",
                      ranks_per_host, " ranks");
  }
  return {.rank_idx = rank_idx,
          .num_ranks = static_cast<int>(num_ranks),
          .num_scaleout_ranks = static_cast<int>(hosts.size()),
          .num_scaleup_ranks = static_cast<int>(ranks_per_host)};
}

Topology logical_topology(const Topology& physical, bool allow_hybrid_mode) noexcept {
  if (allow_hybrid_mode) return physical;
  Topology single_domain = physical;
  single_domain.num_scaleout_ranks = 1;
  single_domain.num_scaleup_ranks = physical.num_ranks;
  return single_domain;
}

}  // namespace deep_ep
