#pragma once
// Dispatch and combine for all ranks at once, slow and obvious: every backend's judge.
//
// Letters as in deep_ep/ep_buffer.hpp. A vector over ranks has R elements, in rank order. A lane is
// one of the K places in a row of topk_idx; one without expert (an id outside 0..E-1) plays no
// role. The same expert in two lanes of a row is received once a rank, and once a lane in an
// expanded output.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "deep_ep/topology.hpp"

namespace deep_ep::reference {

/// What a routing depends on besides the expert ids.
struct RoutingOptions {
  Topology topology;  ///< logical; its rank_idx plays no role
  int num_experts = 0, num_topk = 0;
  std::int64_t num_max_tokens_per_rank = 0;
  std::int64_t expert_alignment = 1;
};

/// Where a row of an output comes from.
struct RowSource {
  int rank_idx = -1;  ///< -1: a row that alignment adds
  std::int64_t token_idx = 0;
  int lane_idx = -1;  ///< -1: in a compact output, which has one row for all lanes
  bool operator==(const RowSource&) const = default;
  bool is_padding() const noexcept { return rank_idx < 0; }
};

/// What one rank receives from and sends to all others.
struct RankRouting {
  std::int64_t num_tokens = 0;              ///< T
  std::vector<RowSource> compact_rows;      ///< `[N]`, by (source rank, token)
  std::vector<RowSource> expanded_rows;     ///< by (expert, source rank, token, lane), with padding
  std::vector<std::int64_t> recv_topk_idx;  ///< `[N, K]`: local expert, -1 if on another rank
  std::vector<std::int64_t> num_recv_tokens_per_expert;               ///< `[L]`, aligned
  std::vector<std::int32_t> num_unaligned_recv_tokens_per_expert;     ///< `[L]`
  std::vector<std::int32_t> psum_num_recv_tokens_per_scaleup_rank;    ///< `[U]`, inclusive
  std::vector<std::int32_t> compact_psum_num_recv_tokens_per_expert;  ///< `[L]`, inclusive, aligned
  std::vector<std::int32_t> expanded_psum_num_recv_tokens_per_expert;  ///< `[L]`, ends of rows
  /// `[N, K + 2]`: global token id; source rank * K + highest lane here; expanded row of each lane
  /// or -1.
  std::vector<std::int32_t> recv_src_metadata;
  std::vector<std::int64_t> topk_idx;  ///< `[T, K]`, as given
  std::vector<std::int32_t>
      compact_dst_rows;  ///< `[T, K]`: row on the expert's rank, -1 without expert
  std::vector<std::int32_t> expanded_dst_rows;  ///< the same for expanded outputs
};

/// The routing of one dispatch.
struct Routing {
  RoutingOptions options;
  std::vector<RankRouting> ranks;

  int num_experts_per_rank() const noexcept {
    return options.num_experts / options.topology.num_ranks;
  }
  /// The rank of an expert, -1 if there is no such expert.
  int rank_of(std::int64_t expert_idx) const noexcept;
};

/// `topk_idx[rank]` is `[T, K]`. Throws kInvalidArgument if the shapes do not fit.
Routing make_routing(const RoutingOptions& options,
                     const std::vector<std::vector<std::int64_t>>& topk_idx);

/// What a dispatch depends on besides the routing and the data.
struct DispatchOptions {
  std::int64_t hidden_bytes = 0;
  std::int64_t num_sf_packs = 0;  ///< P, 0 without scales
  bool has_topk_weights = false;
  bool do_expand = false;
};

/// The data that one rank sends.
struct DispatchInput {
  std::vector<std::byte> x;  ///< `[T, hidden_bytes]`
  std::vector<std::uint32_t>
      x_sf;  ///< pack p of token i at `i * sf_token_stride + p * sf_pack_stride`
  std::int64_t sf_token_stride = 0, sf_pack_stride = 1;
  std::vector<float> topk_weights;  ///< `[T, K]`
};

/// The data that one rank receives, all of it contiguous; padding rows are zero.
struct DispatchOutput {
  std::vector<std::byte> x;         ///< `[n, hidden_bytes]`
  std::vector<std::uint32_t> x_sf;  ///< `[n, P]`
  std::vector<float> topk_weights;  ///< compact `[n, K]`, expanded `[n]`
};

std::vector<DispatchOutput> dispatch(const Routing& routing, const DispatchOptions& options,
                                     const std::vector<DispatchInput>& inputs);

/// `[num_rows, num_packs]` as columns of align(num_rows, 4) packs, whose tails are zero.
std::vector<std::uint32_t> to_tma_col_major(const std::vector<std::uint32_t>& row_major,
                                            std::int64_t num_rows, std::int64_t num_packs);

/// What a combine depends on besides the routing and the data.
struct CombineOptions {
  std::int64_t hidden = 0;
  bool has_topk_weights = false;
  bool do_expand = false;
  bool allow_multiple_reduction = true;
};

using BF16Row = std::vector<std::uint16_t>;

/// What one rank passes to combine, in the order of its rows.
struct CombineInput {
  BF16Row x;                        ///< `[n, H]`
  std::vector<float> topk_weights;  ///< compact `[n, K]`, expanded `[n]`
  std::array<BF16Row, 2> bias;      ///< `[T, H]`, or empty
};

/// What one rank gets back.
struct CombineOutput {
  BF16Row x;                        ///< `[T, H]`
  std::vector<float> topk_weights;  ///< `[T, K]`, 0 for lanes without expert
};

std::vector<CombineOutput> combine(const Routing& routing, const CombineOptions& options,
                                   const std::vector<CombineInput>& inputs);

}  // namespace deep_ep::reference
