#include "core/ep_routing.hpp"

#include <algorithm>
#include <array>

#include "base/check.hpp"

namespace deep_ep {

namespace {

// Lanes fit a 32-bit mask: num_topk <= 32.
constexpr int kMaxLanes = 32;

}  // namespace

void count_selections(const RoutingShape& shape, const TopkIds& ids, std::int64_t num_tokens,
                      std::span<std::int32_t> row) {
  std::ranges::fill(row, 0);
  std::int32_t* to_rank = row.data();
  std::int32_t* to_node = to_rank + shape.topology.num_ranks;
  std::int32_t* of_expert = to_node + shape.topology.num_scaleout_ranks;
  std::array<int, kMaxLanes> ranks{};
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    int num_ranks = 0;
    for (int lane = 0; lane < shape.num_topk; ++lane) {
      const std::int64_t expert = ids.at(token, lane);
      if (expert < 0) continue;
      ++of_expert[expert];
      const int rank = shape.rank_of(expert);
      const auto end = ranks.begin() + num_ranks;
      if (std::find(ranks.begin(), end, rank) != end) continue;
      const int node = shape.node_of(rank);
      if (std::none_of(ranks.begin(), end, [&](int r) { return shape.node_of(r) == node; })) {
        ++to_node[node];
      }
      ++to_rank[rank];
      ranks[static_cast<std::size_t>(num_ranks++)] = rank;
    }
  }
}

std::span<std::int32_t> CountMatrix::values_of(int rank_idx) {
  const auto width = static_cast<std::size_t>(shape_.num_counts());
  return std::span(values_).subspan(static_cast<std::size_t>(rank_idx) * width, width);
}

CountRow CountMatrix::row(int rank_idx) const {
  const auto width = static_cast<std::size_t>(shape_.num_counts());
  return {shape_, std::span(values_).subspan(static_cast<std::size_t>(rank_idx) * width, width)};
}

ReceiveCounts receive_counts(const CountMatrix& counts, int rank_idx) {
  const RoutingShape& shape = counts.shape();
  const auto num_local = static_cast<std::size_t>(shape.num_local_experts());
  ReceiveCounts result;
  result.expert_counts.resize(num_local);
  result.expert_starts.resize(num_local);
  for (int source = 0; source < shape.num_ranks(); ++source) {
    const CountRow row = counts.row(source);
    result.tokens_from_source.push_back(row.tokens_to_rank(rank_idx));
    result.num_tokens += row.tokens_to_rank(rank_idx);
    const auto own =
        row.selections().subspan(static_cast<std::size_t>(rank_idx) * num_local, num_local);
    for (std::size_t e = 0; e < num_local; ++e) result.expert_counts[e] += own[e];
  }
  for (std::size_t e = 0; e < num_local; ++e) {
    result.expert_starts[e] = result.num_aligned_rows;
    result.num_aligned_rows += align_up(result.expert_counts[e], shape.expert_alignment);
  }
  return result;
}

Routing place_tokens(const CountMatrix& counts, int source, const TopkIds& ids,
                     std::int64_t num_tokens, int first_rank, int last_rank) {
  const RoutingShape& shape = counts.shape();
  const int num_local = shape.num_local_experts();

  // The next free row of each rank and expert, from the counts of the sources before this one.
  std::vector<std::int32_t> next_token_row(static_cast<std::size_t>(shape.num_ranks()), 0);
  std::vector<std::int32_t> next_expert_row;
  for (int before = 0; before < source; ++before) {
    const CountRow row = counts.row(before);
    for (int rank = first_rank; rank < last_rank; ++rank) {
      next_token_row[static_cast<std::size_t>(rank)] += row.tokens_to_rank(rank);
    }
  }
  if (shape.do_expand) {
    next_expert_row.assign(static_cast<std::size_t>(shape.num_experts), 0);
    for (int rank = first_rank; rank < last_rank; ++rank) {
      const ReceiveCounts received = receive_counts(counts, rank);
      for (int e = 0; e < num_local; ++e) {
        next_expert_row[static_cast<std::size_t>(rank * num_local + e)] =
            static_cast<std::int32_t>(received.expert_starts[static_cast<std::size_t>(e)]);
      }
    }
    for (int before = 0; before < source; ++before) {
      const auto selections = counts.row(before).selections();
      for (int e = first_rank * num_local; e < last_rank * num_local; ++e) {
        next_expert_row[static_cast<std::size_t>(e)] += selections[static_cast<std::size_t>(e)];
      }
    }
  }

  Routing routing;
  routing.num_topk = shape.num_topk;
  routing.lanes.resize(static_cast<std::size_t>(num_tokens * shape.num_topk));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::span<Lane> lanes(routing.lanes.data() + token * shape.num_topk,
                                static_cast<std::size_t>(shape.num_topk));
    for (int k = 0; k < shape.num_topk; ++k) {
      const std::int64_t expert = ids.at(token, k);
      if (expert < 0) continue;
      const int rank = shape.rank_of(expert);
      if (rank < first_rank || rank >= last_rank) continue;
      Lane& lane = lanes[static_cast<std::size_t>(k)];
      lane.rank = rank;
      lane.expert = static_cast<std::int32_t>(expert);
      lane.is_master = true;
      const auto earlier = lanes.first(static_cast<std::size_t>(k));
      const auto twin = std::ranges::find_if(
          earlier, [&](const Lane& other) { return other.rank == rank && other.is_master; });
      if (twin == earlier.end()) {
        lane.token_row = next_token_row[static_cast<std::size_t>(rank)]++;
      } else {
        lane.token_row = twin->token_row;
        twin->is_master = false;
      }
      lane.row =
          shape.do_expand ? next_expert_row[static_cast<std::size_t>(expert)]++ : lane.token_row;
    }
  }
  return routing;
}

std::int64_t worst_case_rows(const RoutingShape& shape,
                             std::int64_t num_max_tokens_per_rank) noexcept {
  const std::int64_t num_tokens = shape.num_ranks() * num_max_tokens_per_rank;
  if (!shape.do_expand) return num_tokens;
  const std::int64_t num_local = shape.num_local_experts();
  const std::int64_t lanes = std::min<std::int64_t>(shape.num_topk, num_local);
  const std::int64_t alignment = shape.expert_alignment;
  return align_up(num_tokens * lanes + (alignment - 1) * num_local, alignment);
}

}  // namespace deep_ep
