#pragma once
// The stages of a dispatch that move rows: offer, move, publish, and acquire where no ep_finish
// follows.
//
// Each warp takes tokens and writes their rows to the final rows on all their ranks, by bulk copies
// through shared memory where the machine has them. A token with several experts on a rank crosses
// once: in an expanded output it goes to the row of its highest lane there, and ep_finish copies it
// on; this rank's own rows are all written here.
#include <cstdint>

#include "deep_ep/device/bulk_copy.cuh"
#include "deep_ep/device/call.cuh"
#include "deep_ep/device/copy.cuh"

namespace deep_ep::device {

class Mover {
 public:
  __device__ Mover(const abi::MoveParams& params, std::uint8_t* shared)
      : params_(params),
        call_(params.context),
        offers_(reinterpret_cast<Offer*>(shared)),
        stages_(shared + abi::offers_bytes(params.context.num_ranks)),
        num_warps_(static_cast<int>(blockDim.x / 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        thread_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void run() {
    if (call_.has_problem()) {  // ep_count found it
      call_.block_end_on_problem(true);
      return;
    }
    const Announcement* const announcement =
        params_.announces != 0 ? &params_.announcement : nullptr;
    const Call::Opening opening = call_.block_open(announcement, params_.offer, offers_);
    if (opening == Call::Opening::kFault) return;
    if (opening == Call::Opening::kDisagreed) {
      call_.block_end_on_problem(params_.ends_call != 0);
      return;
    }
    move();
    call_.block_end(params_.ends_call != 0);
  }

 private:
  __device__ std::int64_t first_token() const {
    return std::int64_t{blockIdx.x} * num_warps_ + warp_;
  }
  __device__ std::int64_t token_step() const { return std::int64_t{gridDim.x} * num_warps_; }

  __device__ abi::Lane lane_of(std::int64_t token) const {
    if (thread_ >= params_.num_topk) return abi::no_lane();
    return params_.lanes[token * params_.num_topk + thread_];
  }
  // Whether this lane's row is written here.
  __device__ bool is_written(const abi::Lane& lane) const {
    return lane.is_master() || (params_.do_expand != 0 && lane.rank == params_.context.rank_idx);
  }
  template <typename T>
  __device__ T* at(int rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(params_.context.windows[rank] + offset);
  }
  __device__ std::uint8_t* row_of(const abi::Lane& lane) const {
    return at<std::uint8_t>(lane.rank, offers_[lane.rank].x) +
           std::int64_t{lane.row} * params_.row_bytes;
  }

  __device__ void move() const {
#if __CUDA_ARCH__ >= 900
    if (params_.stage_bytes != 0) {
      move_bulk();
      return;
    }
#endif
    with_word(params_.copy_width, [&](auto word) {
      for (std::int64_t token = first_token(); token < params_.num_tokens; token += token_step()) {
        const abi::Lane lane = lane_of(token);
        warp_copy_to_all<decltype(word)>(params_.x + token * params_.row_bytes,
                                         is_written(lane) ? row_of(lane) : nullptr,
                                         params_.row_bytes);
        send_about(token, lane);
      }
    });
  }

#if __CUDA_ARCH__ >= 900
  // A ring of stages a warp. Thread 0 fetches pieces of rows, as many ahead as there are stages but
  // one; each thread stores for its own lane.
  __device__ void move_bulk() const {
    const int num_stages = params_.num_stages;
    const std::int64_t stage_bytes = params_.stage_bytes;
    auto* const barriers = reinterpret_cast<std::uint64_t*>(
        stages_ + std::int64_t{num_warps_} * num_stages * stage_bytes) + warp_ * num_stages;
    std::uint8_t* const stages = stages_ + std::int64_t{warp_} * num_stages * stage_bytes;
    if (thread_ == 0) {
      for (int i = 0; i < num_stages; ++i) barrier_init(&barriers[i]);
      barrier_fence();
    }
    __syncwarp();

    const auto pieces_of_row =
        static_cast<int>((params_.row_bytes + stage_bytes - 1) / stage_bytes);
    const std::int64_t num_own_tokens =
        first_token() < params_.num_tokens
            ? (params_.num_tokens - first_token() + token_step() - 1) / token_step()
            : 0;
    const std::int64_t num_pieces = num_own_tokens * pieces_of_row;
    // The pieces that are fetched, and those that are stored.
    std::int64_t fetch_token = first_token(), fetched = 0;
    int fetch_piece = 0, fetch_stage = 0;
    const auto fetch = [&] {
      if (thread_ == 0) {
        const std::int64_t begin = fetch_piece * stage_bytes;
        bulk_load(stages + fetch_stage * stage_bytes,
                  params_.x + fetch_token * params_.row_bytes + begin, bytes_of_piece(begin),
                  &barriers[fetch_stage]);
      }
      ++fetched;
      if (++fetch_piece == pieces_of_row) {
        fetch_piece = 0;
        fetch_token += token_step();
      }
      if (++fetch_stage == num_stages) fetch_stage = 0;
    };
    while (fetched < num_pieces && fetched < num_stages - 1) fetch();

    int stage = 0;
    std::uint32_t phase = 0;
    for (std::int64_t token = first_token(); token < params_.num_tokens; token += token_step()) {
      const abi::Lane lane = lane_of(token);
      std::uint8_t* const target = is_written(lane) ? row_of(lane) : nullptr;
      for (int piece = 0; piece < pieces_of_row; ++piece) {
        barrier_wait(&barriers[stage], phase);
        const std::int64_t begin = piece * stage_bytes;
        if (target != nullptr) {
          bulk_store(target + begin, stages + stage * stage_bytes, bytes_of_piece(begin));
        }
        bulk_commit();
        if (++stage == num_stages) {
          stage = 0;
          phase ^= 1;
        }
        if (fetched < num_pieces) {
          bulk_wait_read<1>();  // the next stage to fetch into was stored from one piece ago
          __syncwarp();
          fetch();
        }
      }
      send_about(token, lane);
    }
    bulk_wait_all();
  }

  __device__ std::uint32_t bytes_of_piece(std::int64_t begin) const {
    const std::int64_t left = params_.row_bytes - begin;
    return static_cast<std::uint32_t>(left < params_.stage_bytes ? left : params_.stage_bytes);
  }
#endif

  // What goes with the row of a token: scales, weights, ids, metadata.
  __device__ void send_about(std::int64_t token, const abi::Lane& lane) const {
    const unsigned lanes = __ballot_sync(0xffffffff, is_written(lane));
    for (unsigned left = params_.num_sf_packs == 0 ? 0 : lanes; left != 0; left &= left - 1) {
      const int source = __ffs(static_cast<int>(left)) - 1;
      send_scales(token, __shfl_sync(0xffffffff, lane.rank, source),
                  __shfl_sync(0xffffffff, lane.row, source));
    }
    if (params_.do_expand != 0 && params_.topk_weights != nullptr && lane.rank >= 0) {
      at<float>(lane.rank, offers_[lane.rank].topk_weights)[lane.row] =
          params_.topk_weights[token * params_.num_topk + thread_];
    }
    const unsigned masters = __ballot_sync(0xffffffff, lane.is_master());
    for (unsigned left = masters; left != 0; left &= left - 1) {
      const int master = __ffs(static_cast<int>(left)) - 1;
      send_metadata(token, lane, __shfl_sync(0xffffffff, lane.rank, master),
                    __shfl_sync(0xffffffff, lane.token_row, master), master);
    }
  }

  __device__ void send_scales(std::int64_t token, int rank, int row) const {
    const Offer& offer = offers_[rank];
    const std::int32_t* const from = params_.sf + token * params_.sf_row_stride;
    std::int32_t* const to = at<std::int32_t>(rank, offer.sf) + row * offer.sf_row_stride;
    for (int pack = thread_; pack < params_.num_sf_packs; pack += 32) {
      to[pack * offer.sf_column_stride] = from[pack * params_.sf_column_stride];
    }
  }

  __device__ void send_metadata(std::int64_t token, const abi::Lane& lane, int rank, int token_row,
                                int master) const {
    const Offer& offer = offers_[rank];
    const int num_topk = params_.num_topk;
    const bool has_lane = thread_ < num_topk;
    const bool is_there = lane.rank == rank;
    const std::int64_t first = std::int64_t{token_row} * num_topk;
    if (params_.do_expand == 0 && has_lane) {
      const int expert = is_there ? lane.local_expert() : -1;
      if (params_.is_idx_wide != 0) {
        at<std::int64_t>(rank, offer.topk_idx)[first + thread_] = expert;
      } else {
        at<std::int32_t>(rank, offer.topk_idx)[first + thread_] = expert;
      }
      if (params_.topk_weights != nullptr) {
        at<float>(rank, offer.topk_weights)[first + thread_] =
            params_.topk_weights[token * num_topk + thread_];
      }
    }
    if (offer.metadata < 0) return;  // a cached dispatch has it already
    std::int32_t* const metadata =
        at<std::int32_t>(rank, offer.metadata) + std::int64_t{token_row} * (num_topk + 2);
    if (thread_ == 0) {
      metadata[0] = static_cast<std::int32_t>(
          params_.context.rank_idx * params_.num_max_tokens_per_rank + token);
      metadata[1] = params_.context.rank_idx * num_topk + master;
    }
    if (has_lane) metadata[2 + thread_] = is_there ? lane.row : -1;
  }

  const abi::MoveParams& params_;
  const Call call_;
  Offer* const offers_;
  std::uint8_t* const stages_;
  const int num_warps_, warp_, thread_;
};

}  // namespace deep_ep::device

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_move(const __grid_constant__ deep_ep::abi::MoveParams params) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  if (deep_ep::device::Call(params.context).has_fault()) return;
  deep_ep::device::Mover(params, shared).run();
}
