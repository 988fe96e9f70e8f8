#pragma once
// The first stages of a dispatch: count, exchange, place.
//
// count     each warp takes chunks of tokens and counts tokens for each rank, selections of each
//           expert
// exchange  the totals go to every rank's window; the last block to write them announces the call
// place     from the totals of all ranks follows the first row of each chunk, and with it the row of
//           each lane: compact rows by (source rank, token), expanded rows by (expert, source rank,
//           token, lane)
#include <cstdint>

#include "deep_ep/device/call.cuh"

namespace deep_ep::device {

/// What one warp finds out about the lanes of as many whole tokens as fit into it.
struct WarpLanes {
  int expert = -1;  ///< of this thread's lane, or -1
  int rank = -1;
  unsigned same_expert = 0;        ///< threads with the same expert
  unsigned same_token_rank = 0;    ///< threads with the same token and rank
  bool is_used = false;            ///< this thread has a lane
  bool is_first = false;           ///< the lowest lane of its token on its rank
  unsigned firsts_of_rank = 0;     ///< threads that are first, with the same rank
};

class Counter {
 public:
  __device__ Counter(const abi::CountParams& params, int* shared)
      : params_(params),
        call_(params.context),
        shared_(shared),
        num_columns_(params.context.num_ranks + params.num_experts),
        num_warps_(static_cast<int>(blockDim.x / 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        thread_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void run() {
    count();
    if (!call_.block_meet_grid()) return;
    exchange();
    if (!call_.block_wait(Stage::kAnnounced, abi::Site::kAnnounced)) return;
    if (!call_.block_agrees()) {
      tell_host(0, 0);
      call_.block_end_on_problem(params_.ends_on_problem != 0);
      return;
    }
    find_first_rows();
    if (blockIdx.x == 0) describe_received();
    place();
    if (call_.block_is_last(call_.control().num_finished)) call_.reset(false);
  }

 private:
  __device__ int* first_rows() const { return shared_; }  // `[R + E]`, for the whole block
  __device__ int* counters() const { return shared_ + (1 + warp_) * num_columns_; }
  __device__ int num_grid_warps() const { return num_warps_ * static_cast<int>(gridDim.x); }
  __device__ int grid_warp() const {
    return num_warps_ * static_cast<int>(blockIdx.x) + warp_;
  }
  __device__ const std::int32_t* counts_of(int source) const {
    return call_.counts(params_.context.rank_idx, source);
  }

  /// Calls `visit(token, lane, lanes)` for the tokens of a chunk in order, with whole warps.
  template <typename Visit>
  __device__ void for_each_lane(int chunk, const Visit& visit) const {
    const int num_topk = params_.num_topk;
    const int tokens_at_once = 32 / num_topk;
    const std::int64_t begin = std::int64_t{chunk} * params_.tokens_per_chunk;
    const std::int64_t end = min(begin + params_.tokens_per_chunk, params_.num_tokens);
    for (std::int64_t first = begin; first < end; first += tokens_at_once) {
      const std::int64_t token = first + thread_ / num_topk;
      const bool is_used = thread_ < tokens_at_once * num_topk && token < end;
      visit(token, thread_ % num_topk, look_at(token, thread_ % num_topk, is_used));
    }
  }

  __device__ std::int64_t id_at(std::int64_t token, int lane) const {
    const std::int64_t place = token * params_.num_topk + lane;
    return params_.is_idx_wide != 0 ? static_cast<const std::int64_t*>(params_.topk_idx)[place]
                                    : static_cast<const std::int32_t*>(params_.topk_idx)[place];
  }

  __device__ WarpLanes look_at(std::int64_t token, int lane, bool is_used) const {
    constexpr unsigned kAll = 0xffffffff;
    WarpLanes lanes;
    lanes.is_used = is_used;
    if (is_used) {
      const std::int64_t id = id_at(token, lane);
      if (id >= params_.num_experts) {
        refuse(abi::Refusal::kIdTooLarge, token, lane, id);
      } else if (id >= 0) {
        lanes.expert = static_cast<int>(id);
        lanes.rank = lanes.expert / params_.num_local_experts;
      }
    }
    const bool is_valid = lanes.expert >= 0;
    lanes.same_expert = __match_any_sync(kAll, lanes.expert);
    // Threads without an expert match nobody: each has a key of its own.
    const int token_rank = is_valid ? (thread_ / params_.num_topk) * params_.context.num_ranks +
                                          lanes.rank
                                    : -1 - thread_;
    lanes.same_token_rank = __match_any_sync(kAll, token_rank);
    lanes.is_first = is_valid && __ffs(static_cast<int>(lanes.same_token_rank)) - 1 == thread_;
    lanes.firsts_of_rank = __match_any_sync(kAll, lanes.is_first ? lanes.rank : -1 - thread_);
    if (lanes.is_first && __popc(lanes.same_token_rank) > params_.most_lanes_on_rank) {
      refuse(abi::Refusal::kTooManyLanes, token, lane, __popc(lanes.same_token_rank));
    }
    return lanes;
  }

  // The first thread that finds something wrong says so in the announcement.
  __device__ void refuse(abi::Refusal refusal, std::int64_t token, int lane,
                         std::int64_t value) const {
    Control& control = call_.control();
    if (atomicCAS(&control.refusal, 0u, static_cast<std::uint32_t>(refusal)) != 0) return;
    control.bad_token = token;
    control.bad_lane = lane;
    control.bad_value = value;
  }

  __device__ void count() const {
    int* const counts = counters();
    for (int chunk = grid_warp(); chunk < params_.num_chunks; chunk += num_grid_warps()) {
      for (int i = thread_; i < num_columns_; i += 32) counts[i] = 0;
      __syncwarp();
      for_each_lane(chunk, [&](std::int64_t, int, const WarpLanes& lanes) {
        if (lanes.is_first) atomicAdd(&counts[lanes.rank], 1);
        if (lanes.expert >= 0) {
          atomicAdd(&counts[params_.context.num_ranks + lanes.expert], 1);
        }
      });
      __syncwarp();
      std::int32_t* const row = params_.chunk_counts + std::int64_t{chunk} * num_columns_;
      for (int i = thread_; i < num_columns_; i += 32) row[i] = counts[i];
      __syncwarp();
    }
  }

  // Turns the counts of chunks into counts of the chunks before, and sends the totals to all ranks.
  __device__ void exchange() const {
    for (int column = grid_warp(); column < num_columns_; column += num_grid_warps()) {
      int total = 0;
      for (int first = 0; first < params_.num_chunks; first += 32) {
        const int chunk = first + thread_;
        std::int32_t* const cell =
            params_.chunk_counts + std::int64_t{chunk} * num_columns_ + column;
        const int own = chunk < params_.num_chunks ? *cell : 0;
        const int sum = warp_inclusive_sum(own);
        if (chunk < params_.num_chunks) *cell = total + sum - own;
        total += __shfl_sync(0xffffffff, sum, 31);
      }
      for (int peer = thread_; peer < params_.context.num_ranks; peer += 32) {
        call_.counts(peer, params_.context.rank_idx)[column] = total;
      }
    }
    if (!call_.block_is_last(call_.control().num_arrived)) return;
    __shared__ Announcement announcement;
    if (warp_ == 0) Call::warp_write(announcement, params_.announcement);
    __syncthreads();
    const Control& control = call_.control();
    if (threadIdx.x == 0 && control.refusal != 0) {
      announcement.refusal = static_cast<abi::Refusal>(control.refusal);
      announcement.bad_token = control.bad_token;
      announcement.bad_lane = control.bad_lane;
      announcement.bad_value = control.bad_value;
    }
    __syncthreads();
    call_.announce_to_all(&announcement, nullptr, Stage::kAnnounced);
  }

  // Where the rows of this rank's tokens begin: by rank, and by expert if expanded.
  __device__ void find_first_rows() const {
    const int num_ranks = params_.context.num_ranks;
    const int num_local = params_.num_local_experts;
    int* const rows = first_rows();
    for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks;
         rank += static_cast<int>(blockDim.x)) {
      int before = 0;
      for (int source = 0; source < params_.context.rank_idx; ++source) {
        before += counts_of(source)[rank];
      }
      rows[rank] = before;
    }
    if (params_.do_expand != 0) {
      int* const expert_rows = rows + num_ranks;
      for (int expert = static_cast<int>(threadIdx.x); expert < params_.num_experts;
           expert += static_cast<int>(blockDim.x)) {
        int total = 0;
        for (int source = 0; source < num_ranks; ++source) {
          total += counts_of(source)[num_ranks + expert];
        }
        expert_rows[expert] = aligned(total);
      }
      __syncthreads();
      for (int rank = warp_; rank < num_ranks; rank += num_warps_) {
        warp_exclusive_sum(expert_rows + rank * num_local, num_local);
      }
      __syncthreads();
      for (int expert = static_cast<int>(threadIdx.x); expert < params_.num_experts;
           expert += static_cast<int>(blockDim.x)) {
        for (int source = 0; source < params_.context.rank_idx; ++source) {
          expert_rows[expert] += counts_of(source)[num_ranks + expert];
        }
      }
    }
    __syncthreads();
  }

  __device__ int aligned(int num_rows) const {
    const int alignment = params_.expert_alignment;
    return (num_rows + alignment - 1) / alignment * alignment;
  }

  __device__ int warp_inclusive_sum(int value) const {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(0xffffffff, value, static_cast<unsigned>(distance));
      if (thread_ >= distance) value += below;
    }
    return value;
  }

  __device__ void warp_exclusive_sum(int* values, int size) const {
    int total = 0;
    for (int first = 0; first < size; first += 32) {
      const int i = first + thread_;
      const int own = i < size ? values[i] : 0;
      const int sum = warp_inclusive_sum(own);
      if (i < size) values[i] = total + sum - own;
      total += __shfl_sync(0xffffffff, sum, 31);
    }
  }

  // One block: what this rank receives, for the handle, the statistics and the host.
  __device__ void describe_received() const {
    const int num_ranks = params_.context.num_ranks;
    const int num_local = params_.num_local_experts;
    const int first_expert = num_ranks + params_.context.rank_idx * num_local;
    int* const starts = shared_ + num_columns_;  // `[L + R]`: counters that are not in use yet
    int* const from_source = starts + num_local;
    for (int i = static_cast<int>(threadIdx.x); i < num_local; i += static_cast<int>(blockDim.x)) {
      int total = 0;
      for (int source = 0; source < num_ranks; ++source) {
        total += counts_of(source)[first_expert + i];
      }
      starts[i] = aligned(total);
      params_.num_unaligned_recv_tokens_per_expert[i] = total;
      if (params_.cumulative_stats != nullptr) params_.cumulative_stats[i] += total;
      if (params_.ticket != 0) params_.host_expert_counts[i] = total;
    }
    for (int source = static_cast<int>(threadIdx.x); source < num_ranks;
         source += static_cast<int>(blockDim.x)) {
      from_source[source] = counts_of(source)[params_.context.rank_idx];
    }
    __threadfence_system();  // the host reads its counts after the ticket
    __syncthreads();
    if (warp_ == 0) warp_exclusive_sum(starts, num_local);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < num_local; i += static_cast<int>(blockDim.x)) {
      const int total = params_.num_unaligned_recv_tokens_per_expert[i];
      params_.psum_num_recv_tokens_per_expert[i] =
          starts[i] + (params_.do_expand != 0 ? total : aligned(total));
    }
    if (threadIdx.x == 0) {
      int num_tokens = 0;
      for (int place = 0; place < params_.num_scaleup_ranks; ++place) {
        for (int source = place; source < num_ranks; source += params_.num_scaleup_ranks) {
          num_tokens += from_source[source];
        }
        params_.psum_num_recv_tokens_per_scaleup_rank[place] = num_tokens;
      }
      params_.received->num_tokens = num_tokens;
      const int last = num_local - 1;
      tell_host(num_tokens,
                starts[last] + aligned(params_.num_unaligned_recv_tokens_per_expert[last]));
    }
    __syncthreads();  // the counters are free again
  }

  // Any one thread may call it; the host waits for the ticket.
  __device__ void tell_host(std::int64_t num_tokens, std::int64_t num_rows) const {
    if (params_.ticket == 0 || blockIdx.x != 0 || threadIdx.x != 0) return;
    abi::ReceivedCounts& received = params_.context.host->received;
    received.num_tokens = num_tokens;
    received.num_aligned_rows = num_rows;
    __threadfence_system();
    store_release_sys(&received.ticket, params_.ticket);
  }

  __device__ void place() const {
    int* const next_rows = counters();
    for (int chunk = grid_warp(); chunk < params_.num_chunks; chunk += num_grid_warps()) {
      const std::int32_t* const before =
          params_.chunk_counts + std::int64_t{chunk} * num_columns_;
      const int num_columns = params_.do_expand != 0 ? num_columns_ : params_.context.num_ranks;
      for (int i = thread_; i < num_columns; i += 32) next_rows[i] = first_rows()[i] + before[i];
      __syncwarp();
      for_each_lane(chunk, [&](std::int64_t token, int lane, const WarpLanes& lanes) {
        place_lane(next_rows, token, lane, lanes);
      });
      __syncwarp();
    }
  }

  __device__ void place_lane(int* next_rows, std::int64_t token, int lane,
                             const WarpLanes& lanes) const {
    const unsigned below = (1u << thread_) - 1;
    const bool is_valid = lanes.expert >= 0;
    int* const next_of_expert =
        next_rows + params_.context.num_ranks + (is_valid ? lanes.expert : 0);
    int token_row = lanes.is_first ? next_rows[lanes.rank] + __popc(lanes.firsts_of_rank & below) : 0;
    const bool is_expanded = params_.do_expand != 0 && is_valid;
    const int expert_row = is_expanded ? *next_of_expert + __popc(lanes.same_expert & below) : 0;
    __syncwarp();
    if (lanes.is_first && (lanes.firsts_of_rank & below) == 0) {
      next_rows[lanes.rank] += __popc(lanes.firsts_of_rank);
    }
    if (is_expanded && (lanes.same_expert & below) == 0) {
      *next_of_expert += __popc(lanes.same_expert);
    }
    __syncwarp();
    const int first = __ffs(static_cast<int>(lanes.same_token_rank)) - 1;
    token_row = __shfl_sync(0xffffffff, token_row, first);
    if (!lanes.is_used) return;
    const bool is_master = is_valid && (31 - __clz(static_cast<int>(lanes.same_token_rank))) == thread_;
    const std::int64_t place = token * params_.num_topk + lane;
    abi::Lane result = abi::no_lane();
    if (is_valid) {
      result.rank = lanes.rank;
      result.token_row = token_row;
      result.row = is_expanded ? expert_row : token_row;
      result.expert_and_master =
          2 * (lanes.expert - lanes.rank * params_.num_local_experts) + (is_master ? 1 : 0);
    }
    params_.lanes[place] = result;
    params_.dst_rows[place] = result.row;
  }

  const abi::CountParams& params_;
  const Call call_;
  int* const shared_;
  const int num_columns_, num_warps_, warp_, thread_;
};

}  // namespace deep_ep::device

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_count(const __grid_constant__ deep_ep::abi::CountParams params) {
  extern __shared__ int shared[];
  if (deep_ep::device::Call(params.context).has_fault()) return;
  deep_ep::device::Counter(params, shared).run();
}
