#pragma once
// The first stage of a combine whose input peers can't read as it lies: this rank's rows go to its
// window, where several rows of a token are summed and rounded on the way, so that each token
// crosses once.
#include <cstdint>

#include "deep_ep/device/bf16.cuh"
#include "deep_ep/device/call.cuh"
#include "deep_ep/device/copy.cuh"

namespace deep_ep::device {

class CombineStager {
 public:
  __device__ explicit CombineStager(const abi::CombineStageParams& params)
      : params_(params),
        thread_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {}

  __device__ void run(const std::uint8_t** rows_of_warps) const {
    const std::int64_t num_tokens = params_.received->num_tokens;
    const std::int64_t step = std::int64_t{gridDim.x} * (blockDim.x / 32);
    for (std::int64_t token = std::int64_t{blockIdx.x} * (blockDim.x / 32) + warp_;
         token < num_tokens; token += step) {
      const int row = lane_row(token);
      if (params_.staged_x != nullptr) stage_rows(token, row, rows_of_warps + warp_ * 32);
      if (params_.staged_topk_weights != nullptr) stage_weights(token, row);
    }
  }

 private:
  // The row of this thread's lane in x, -1 for lanes on other ranks. Compact: the token's own.
  __device__ int lane_row(std::int64_t token) const {
    if (thread_ >= params_.num_topk) return -1;
    return params_.metadata[token * (params_.num_topk + 2) + 2 + thread_];
  }

  __device__ void stage_rows(std::int64_t token, int lane_row, const std::uint8_t** rows) const {
    const std::uint8_t* const own = params_.x + lane_row * params_.row_bytes;
    if (params_.do_expand != 0 && params_.sums_rows != 0) {
      const unsigned lanes = __ballot_sync(0xffffffff, lane_row >= 0);
      if (lane_row >= 0) rows[__popc(lanes & ((1u << thread_) - 1))] = own;
      __syncwarp();
      const Terms terms = {rows, __popc(lanes), ~std::uint64_t{0}};
      with_bf16_word(params_.copy_width, [&](auto word) {
        warp_sum_rows<decltype(word)>(params_.staged_x + token * params_.row_bytes, terms,
                                      params_.row_bytes);
      });
      __syncwarp();
      return;
    }
    if (params_.do_expand == 0) {
      copy(params_.x + token * params_.row_bytes, params_.staged_x + token * params_.row_bytes);
      return;
    }
    for (unsigned left = __ballot_sync(0xffffffff, lane_row >= 0); left != 0; left &= left - 1) {
      const std::int64_t row = __shfl_sync(0xffffffff, lane_row, __ffs(static_cast<int>(left)) - 1);
      copy(params_.x + row * params_.row_bytes, params_.staged_x + row * params_.row_bytes);
    }
  }

  __device__ void copy(const std::uint8_t* from, std::uint8_t* to) const {
    with_word(params_.copy_width, [&](auto word) {
      warp_copy_to_all<decltype(word)>(from, thread_ == 0 ? to : nullptr, params_.row_bytes);
    });
  }

  __device__ void stage_weights(std::int64_t token, int lane_row) const {
    if (thread_ >= params_.num_topk) return;
    if (params_.do_expand == 0) {
      const std::int64_t place = token * params_.num_topk + thread_;
      params_.staged_topk_weights[place] = params_.topk_weights[place];
    } else if (lane_row >= 0) {
      params_.staged_topk_weights[lane_row] = params_.topk_weights[lane_row];
    }
  }

  const abi::CombineStageParams& params_;
  const int thread_, warp_;
};

}  // namespace deep_ep::device

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_combine_stage(const __grid_constant__ deep_ep::abi::CombineStageParams params) {
  __shared__ const std::uint8_t* rows_of_warps[16 * 32];
  if (deep_ep::device::Call(params.context).has_fault()) return;
  deep_ep::device::CombineStager(params).run(rows_of_warps);
}
