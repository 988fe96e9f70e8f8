#pragma once
// Arguments of the EP kernels.
#include <cstdint>

#include "deep_ep/abi/status.hpp"
#include "deep_ep/abi/window.hpp"

namespace deep_ep::abi {

/// What every kernel of a buffer works with.
struct Context {
  std::uint8_t* window;             ///< of this rank
  std::uint8_t* const* windows;     ///< `[num_ranks]`, in device memory: all ranks' windows
  HostStatus* host;
  Announcement* host_announcements;  ///< `[num_ranks]`, in the host's memory
  std::uint64_t timeout_ns;          ///< of each wait
  WindowLayout layout;
  std::int32_t rank_idx, num_ranks;
};

/// The way of one (token, lane).
struct alignas(16) Lane {
  std::int32_t rank;       ///< -1: no expert
  std::int32_t row;        ///< in that rank's output: token_row, or the lane's expanded row
  std::int32_t token_row;  ///< row of the token in the compact order of that rank
  std::int32_t expert_and_master;  ///< 2 * local expert, + 1 on the highest lane of its token there

  /// The highest lane of its token on its rank.
  constexpr bool is_master() const noexcept { return rank >= 0 && (expert_and_master & 1) != 0; }
  constexpr std::int32_t local_expert() const noexcept { return expert_and_master >> 1; }
};
static_assert(sizeof(Lane) == 16);
constexpr Lane no_lane() noexcept { return {-1, -1, -1, -2}; }

/// Shared memory of a block for the offers of all ranks; what follows is aligned for bulk copies.
constexpr std::int64_t offers_bytes(int num_ranks) noexcept {
  return align_up(num_ranks * static_cast<std::int64_t>(sizeof(Offer)), 128);
}

/// What the owner of a handle receives, in device memory.
struct Received {
  std::int64_t num_tokens;
};

struct CountParams {
  Context context;
  Announcement announcement;
  const void* topk_idx;  ///< `[T, K]`
  std::int64_t num_tokens;
  std::int64_t num_max_tokens_per_rank;
  std::int32_t num_topk, num_experts, num_local_experts, expert_alignment;
  std::int32_t num_scaleup_ranks;
  std::int32_t most_lanes_on_rank;  ///< of one token; more is refused
  std::int32_t is_idx_wide, do_expand;
  std::int32_t ends_on_problem;  ///< 1: no other kernel of this call follows a problem
  std::int32_t tokens_per_chunk, num_chunks;
  std::int32_t* chunk_counts;  ///< scratch `[num_chunks, R + E]`
  Lane* lanes;                 ///< out `[T, K]`
  std::int32_t* dst_rows;      ///< out `[T, K]`
  Received* received;          ///< out
  std::int32_t* psum_num_recv_tokens_per_scaleup_rank;  ///< out `[U]`
  std::int32_t* psum_num_recv_tokens_per_expert;        ///< out `[L]`
  std::int32_t* num_unaligned_recv_tokens_per_expert;   ///< out `[L]`
  std::int32_t* cumulative_stats;                       ///< in and out `[L]`, or null
  std::int32_t* host_expert_counts;                     ///< out `[L]`, in the host's memory
  std::uint64_t ticket;                                 ///< 0: the host does not wait
};

struct MoveParams {
  Context context;
  Announcement announcement;
  Offer offer;
  const std::uint8_t* x;
  const std::int32_t* sf;
  const float* topk_weights;  ///< or null
  const Lane* lanes;
  std::int64_t num_tokens;
  std::int64_t num_max_tokens_per_rank;
  std::int64_t row_bytes;
  std::int64_t sf_row_stride, sf_column_stride;
  std::int32_t num_sf_packs, num_topk;
  std::int32_t is_idx_wide, do_expand;
  std::int32_t announces;  ///< 1: the first kernel of its call, so it announces the call
  std::int32_t ends_call;  ///< 0: ep_finish follows
  std::int32_t copy_width;   ///< bytes of an access: 16, 8, 4, 2 or 1
  std::int32_t stage_bytes;  ///< of a bulk copy's stage; 0: no bulk copies
  std::int32_t num_stages;   ///< a warp
};

struct FinishParams {
  Context context;
  std::uint8_t* x;       ///< `[n, row_bytes]`, expanded
  std::int32_t* sf;
  float* topk_weights;   ///< `[n]`, or null
  const std::int32_t* metadata;  ///< `[N, K + 2]`
  const Received* received;
  const std::int32_t* expert_counts;  ///< `[L]`, unaligned
  const std::int32_t* expert_ends;    ///< `[L]`, first row past the expert's, without padding
  std::int64_t num_max_tokens_per_rank;
  std::int64_t row_bytes;
  std::int64_t sf_row_stride, sf_column_stride;
  std::int32_t num_sf_packs, num_topk, num_local_experts, expert_alignment;
  std::int32_t do_zero_padding;
  std::int32_t copy_width;
};

/// Brings a rank's expert outputs to where its peers can read them.
struct CombineStageParams {
  Context context;
  const std::uint8_t* x;
  std::uint8_t* staged_x;             ///< in the window; null: x lies there already
  const float* topk_weights;
  float* staged_topk_weights;         ///< in the window, or null
  const std::int32_t* metadata;       ///< `[N, K + 2]`
  const Received* received;
  std::int64_t row_bytes;
  std::int32_t num_topk;
  std::int32_t do_expand;
  std::int32_t sums_rows;  ///< 1: one row a token, the sum of its expanded rows, rounded to BF16
  std::int32_t copy_width;
};

struct CombineParams {
  Context context;
  Announcement announcement;
  Offer offer;
  const Lane* lanes;
  const std::uint8_t* bias[2];        ///< or null
  std::uint8_t* combined_x;           ///< `[T, row_bytes]`
  float* combined_topk_weights;       ///< `[T, K]`, or null
  std::int64_t num_tokens;
  std::int64_t row_bytes;
  std::int32_t num_topk, num_scaleup_ranks;
  std::int32_t do_expand;         ///< weights are those of expanded rows
  std::int32_t has_lane_rows;     ///< rows are read lane by lane, not rank by rank
  std::int32_t rounds_per_domain;  ///< the rows of a domain are summed and rounded first
  std::int32_t copy_width;
};

/// A call without rows: a barrier, a refusal, or the last one of a rank.
struct MeetParams {
  Context context;
  Announcement announcement;
  std::int32_t leaves;    ///< 1: tell the peers that this rank makes no more calls, wait for nobody
};

}  // namespace deep_ep::abi
