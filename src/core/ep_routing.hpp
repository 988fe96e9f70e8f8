#pragma once
// Where every token goes: counts of all ranks in, final rows out. Every rank computes the same.
//
// Compact rows of a rank are ordered by (source rank, token); expanded rows by (expert, source
// rank, token, lane), each expert's rows padded to a multiple of the alignment. So the first row of
// a source is a sum over the sources before it, and a sender knows the final row of each token
// without asking.
#include <cstdint>
#include <span>
#include <vector>

#include "deep_ep/tensor.hpp"
#include "deep_ep/topology.hpp"

namespace deep_ep {

constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

/// The shape of a routing, equal on all ranks.
struct RoutingShape {
  Topology topology;
  int num_experts = 0;
  int num_topk = 0;
  int expert_alignment = 1;
  bool do_expand = false;

  int num_ranks() const noexcept { return topology.num_ranks; }
  int num_local_experts() const noexcept { return num_experts / topology.num_ranks; }
  int rank_of(std::int64_t expert) const noexcept {
    return static_cast<int>(expert / num_local_experts());
  }
  int node_of(int rank_idx) const noexcept { return rank_idx / topology.num_scaleup_ranks; }
  /// Values in one rank's row of the count matrix.
  std::int64_t num_counts() const noexcept {
    return topology.num_ranks + topology.num_scaleout_ranks + num_experts;
  }
};

/// Ids of `[num_tokens, num_topk]`, of either width.
class TopkIds {
 public:
  TopkIds() = default;
  explicit TopkIds(const TensorView& view)
      : data_(view.data), is_wide_(view.dtype == DType::kInt64), num_topk_(view.shape[1]) {}
  std::int64_t at(std::int64_t token, int lane) const noexcept {
    const std::int64_t position = token * num_topk_ + lane;
    return is_wide_ ? static_cast<const std::int64_t*>(data_)[position]
                    : static_cast<const std::int32_t*>(data_)[position];
  }

 private:
  const void* data_ = nullptr;
  bool is_wide_ = true;
  std::int64_t num_topk_ = 0;
};

/// One rank's counts: tokens for each rank, tokens for each domain, selections of each expert.
/// A token counts once a rank and once a domain, a selection once a lane.
class CountRow {
 public:
  CountRow(const RoutingShape& shape, std::span<const std::int32_t> values)
      : values_(values),
        num_ranks_(static_cast<std::size_t>(shape.topology.num_ranks)),
        num_nodes_(static_cast<std::size_t>(shape.topology.num_scaleout_ranks)) {}
  std::int32_t tokens_to_rank(int rank_idx) const {
    return values_[static_cast<std::size_t>(rank_idx)];
  }
  std::int32_t tokens_to_node(int node) const {
    return values_[num_ranks_ + static_cast<std::size_t>(node)];
  }
  std::span<const std::int32_t> selections() const {
    return values_.subspan(num_ranks_ + num_nodes_);
  }

 private:
  std::span<const std::int32_t> values_;
  std::size_t num_ranks_, num_nodes_;
};

/// Fills `row` (num_counts() values) with the counts of these tokens.
void count_selections(const RoutingShape& shape, const TopkIds& ids, std::int64_t num_tokens,
                      std::span<std::int32_t> row);

/// The counts of all ranks.
class CountMatrix {
 public:
  explicit CountMatrix(const RoutingShape& shape)
      : shape_(shape),
        values_(static_cast<std::size_t>(shape.num_counts() * shape.topology.num_ranks)) {}
  const RoutingShape& shape() const noexcept { return shape_; }
  std::span<std::int32_t> values_of(int rank_idx);
  CountRow row(int rank_idx) const;

 private:
  RoutingShape shape_;
  std::vector<std::int32_t> values_;
};

/// What one rank receives.
struct ReceiveCounts {
  std::int64_t num_tokens = 0;                   ///< N
  std::int64_t num_aligned_rows = 0;             ///< sum of aligned expert counts
  std::vector<std::int32_t> tokens_from_source;  ///< `[R]`
  std::vector<std::int64_t> expert_counts;       ///< `[L]`, unaligned
  std::vector<std::int64_t> expert_starts;       ///< `[L]`, first expanded row
};
ReceiveCounts receive_counts(const CountMatrix& counts, int rank_idx);

/// The way of one (token, lane).
struct Lane {
  std::int32_t rank = -1;       ///< rank of the expert; -1: no expert, or not in the asked range
  std::int32_t expert = -1;     ///< global id, or -1
  std::int32_t token_row = -1;  ///< row of the token in the compact order of that rank
  std::int32_t row = -1;  ///< row of the lane in that rank's output: token_row, or its expanded row
  bool is_master = false;  ///< the highest lane of its token on that rank
};

/// The way of some tokens of one source.
struct Routing {
  int num_topk = 0;
  std::vector<Lane> lanes;  ///< `[num_tokens, num_topk]`
  std::int64_t num_tokens() const noexcept {
    return num_topk == 0 ? 0 : static_cast<std::int64_t>(lanes.size()) / num_topk;
  }
  std::span<const Lane> token(std::int64_t token_idx) const noexcept {
    return {lanes.data() + token_idx * num_topk, static_cast<std::size_t>(num_topk)};
  }
};

/// Places the tokens of `source`, looking only at experts on ranks [first_rank, last_rank). The
/// tokens must be all those of the source that select such an expert, in order; others may be among
/// them.
Routing place_tokens(const CountMatrix& counts, int source, const TopkIds& ids,
                     std::int64_t num_tokens, int first_rank, int last_rank);

/// Number of rows in an output without CPU sync: R * M, or the aligned worst case of expanded rows.
std::int64_t worst_case_rows(const RoutingShape& shape,
                             std::int64_t num_max_tokens_per_rank) noexcept;

}  // namespace deep_ep
