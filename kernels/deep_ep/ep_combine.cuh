#pragma once
// Combine: announce and offer the rows of this rank, then read the rows of this rank's tokens where
// they lie, in the windows of all ranks, and sum them in FP32 in a fixed order: bias first, then
// ranks by the highest lane of the token on them.
#include <cstdint>

#include "deep_ep/device/bf16.cuh"
#include "deep_ep/device/call.cuh"
#include "deep_ep/device/copy.cuh"

namespace deep_ep::device {

inline constexpr int kMaxTerms = 34;  ///< lanes of a token, and two biases

class Combiner {
 public:
  __device__ Combiner(const abi::CombineParams& params, Offer* offers)
      : params_(params),
        call_(params.context),
        offers_(offers),
        thread_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {}

  __device__ void run(const std::uint8_t** rows_of_warps) {
    const Call::Opening opening =
        call_.block_open(&params_.announcement, params_.offer, offers_);
    if (opening == Call::Opening::kFault) return;
    if (opening == Call::Opening::kDisagreed) {
      call_.block_end_on_problem(true);
      return;
    }
    const std::int64_t step = std::int64_t{gridDim.x} * (blockDim.x / 32);
    for (std::int64_t token = std::int64_t{blockIdx.x} * (blockDim.x / 32) + warp_;
         token < params_.num_tokens; token += step) {
      combine(token, rows_of_warps + warp_ * kMaxTerms);
    }
    call_.block_end(true);
  }

 private:
  __device__ void combine(std::int64_t token, const std::uint8_t** rows) const {
    abi::Lane lane = abi::no_lane();
    if (thread_ < params_.num_topk) lane = params_.lanes[token * params_.num_topk + thread_];
    const Terms terms = params_.has_lane_rows != 0 ? lane_terms(token, lane, rows)
                                                   : rank_terms(token, lane, rows);
    with_bf16_word(params_.copy_width, [&](auto word) {
      warp_sum_rows<decltype(word)>(params_.combined_x + token * params_.row_bytes, terms,
                                    params_.row_bytes);
    });
    __syncwarp();
    if (params_.combined_topk_weights == nullptr || thread_ >= params_.num_topk) return;
    params_.combined_topk_weights[token * params_.num_topk + thread_] = weight_of(lane);
  }

  __device__ float weight_of(const abi::Lane& lane) const {
    if (lane.rank < 0) return 0.0f;
    const auto* const weights = reinterpret_cast<const float*>(
        params_.context.windows[lane.rank] + offers_[lane.rank].topk_weights);
    return params_.do_expand != 0
               ? weights[lane.row]
               : weights[std::int64_t{lane.token_row} * params_.num_topk + thread_];
  }

  __device__ const std::uint8_t* row_of(const abi::Lane& lane, int row) const {
    return params_.context.windows[lane.rank] + offers_[lane.rank].x +
           std::int64_t{row} * params_.row_bytes;
  }

  // Puts the biases first; returns how many there are.
  __device__ int bias_terms(std::int64_t token, const std::uint8_t** rows) const {
    int num_rows = 0;
    for (const std::uint8_t* bias : params_.bias) {
      if (bias == nullptr) continue;
      if (thread_ == 0) rows[num_rows] = bias + token * params_.row_bytes;
      ++num_rows;
    }
    return num_rows;
  }

  // One term a lane, by lane.
  __device__ Terms lane_terms(std::int64_t token, const abi::Lane& lane,
                              const std::uint8_t** rows) const {
    const int num_biases = bias_terms(token, rows);
    const unsigned lanes = __ballot_sync(0xffffffff, lane.rank >= 0);
    if (lane.rank >= 0) {
      rows[num_biases + __popc(lanes & ((1u << thread_) - 1))] = row_of(lane, lane.row);
    }
    __syncwarp();
    return {rows, num_biases + __popc(lanes), ~std::uint64_t{0}};
  }

  // One term a rank, by the rank's highest lane; or, rounded for each domain, domains by their
  // highest lane and the ranks of a domain by theirs.
  __device__ Terms rank_terms(std::int64_t token, const abi::Lane& lane,
                              const std::uint8_t** rows) const {
    constexpr unsigned kAll = 0xffffffff;
    const int num_biases = bias_terms(token, rows);
    const bool is_term = lane.is_master();
    const unsigned terms = __ballot_sync(kAll, is_term);
    const int domain = is_term ? lane.rank / params_.num_scaleup_ranks : -1 - thread_;
    const unsigned of_domain = __match_any_sync(kAll, domain);
    const int highest = 31 - __clz(static_cast<int>(of_domain));
    int place = __popc(terms & ((1u << thread_) - 1));
    bool ends_group = true;
    if (params_.rounds_per_domain != 0) {
      // Terms of domains whose highest lane is below this one's, then those of the domain itself.
      place = __popc(of_domain & ((1u << thread_) - 1));
      for (unsigned left = terms; left != 0; left &= left - 1) {
        const int other = __ffs(static_cast<int>(left)) - 1;
        place += __shfl_sync(kAll, highest, other) < highest ? 1 : 0;
      }
      ends_group = highest == thread_;
    }
    std::uint64_t ends = ends_group ? std::uint64_t{1} << (num_biases + place) : 0;
    if (!is_term) ends = 0;
    const auto low = __reduce_or_sync(kAll, static_cast<unsigned>(ends));
    const auto high = __reduce_or_sync(kAll, static_cast<unsigned>(ends >> 32));
    const std::uint64_t biases = (std::uint64_t{1} << num_biases) - 1;
    if (is_term) {
      rows[num_biases + place] = row_of(lane, params_.do_expand != 0 ? lane.token_row : lane.row);
    }
    __syncwarp();
    return {rows, num_biases + __popc(terms), biases | low | (std::uint64_t{high} << 32)};
  }

  const abi::CombineParams& params_;
  const Call call_;
  Offer* const offers_;
  const int thread_, warp_;
};

}  // namespace deep_ep::device

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_combine(const __grid_constant__ deep_ep::abi::CombineParams params) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  __shared__ const std::uint8_t* rows_of_warps[16 * deep_ep::device::kMaxTerms];
  if (deep_ep::device::Call(params.context).has_fault()) return;
  deep_ep::device::Combiner(params, reinterpret_cast<deep_ep::abi::Offer*>(shared))
      .run(rows_of_warps);
}
