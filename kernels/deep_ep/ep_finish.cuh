#pragma once
// The last stages of an expanded dispatch: acquire, and finish what stays on this rank: tokens of
// peers with several experts here, and padding.
#include <cstdint>

#include "deep_ep/device/call.cuh"
#include "deep_ep/device/copy.cuh"

namespace deep_ep::device {

class Finisher {
 public:
  __device__ explicit Finisher(const abi::FinishParams& params)
      : params_(params),
        call_(params.context),
        num_warps_(static_cast<int>(blockDim.x / 32)),
        warp_(static_cast<int>(threadIdx.x / 32)),
        thread_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void run() {
    if (!call_.has_problem()) {
      if (params_.do_zero_padding != 0) clear_padding();  // no peer writes there
      if (!call_.block_wait(Stage::kDone, abi::Site::kDone)) return;
      fan_out();
    }
    if (call_.block_is_last(call_.control().num_finished)) call_.reset(true);
  }

 private:
  __device__ std::int64_t first() const { return std::int64_t{blockIdx.x} * num_warps_ + warp_; }
  __device__ std::int64_t step() const { return std::int64_t{gridDim.x} * num_warps_; }
  __device__ std::uint8_t* row(std::int64_t row_idx) const {
    return params_.x + row_idx * params_.row_bytes;
  }

  __device__ void clear_padding() const {
    for (int expert = 0; expert < params_.num_local_experts; ++expert) {
      const int alignment = params_.expert_alignment;
      const int num_rows = params_.expert_counts[expert];
      const std::int64_t end = params_.expert_ends[expert];
      const std::int64_t last =
          end - num_rows + (num_rows + alignment - 1) / alignment * alignment;
      for (std::int64_t padding = end + first(); padding < last; padding += step()) {
        with_word(params_.copy_width, [&](auto word) {
          using Word = decltype(word);
          auto* const words = reinterpret_cast<Word*>(row(padding));
          for (std::int64_t i = thread_;
               i < params_.row_bytes / static_cast<std::int64_t>(sizeof(Word)); i += 32) {
            words[i] = Word{};
          }
        });
        for (int pack = thread_; pack < params_.num_sf_packs; pack += 32) {
          scale(padding, pack) = 0;
        }
        if (thread_ == 0 && params_.topk_weights != nullptr) params_.topk_weights[padding] = 0.0f;
      }
    }
  }

  __device__ std::int32_t& scale(std::int64_t row_idx, int pack) const {
    return params_.sf[row_idx * params_.sf_row_stride + pack * params_.sf_column_stride];
  }

  // Copies the row of each peer's token to its other experts.
  __device__ void fan_out() const {
    const std::int64_t num_tokens = params_.received->num_tokens;
    for (std::int64_t token = first(); token < num_tokens; token += step()) {
      const std::int32_t* const metadata = params_.metadata + token * (params_.num_topk + 2);
      if (metadata[0] / params_.num_max_tokens_per_rank == params_.context.rank_idx) continue;
      const int lane_row = thread_ < params_.num_topk ? metadata[2 + thread_] : -1;
      const int master = metadata[1] % params_.num_topk;
      const int master_row = __shfl_sync(0xffffffff, lane_row, master);
      const bool is_copy = lane_row >= 0 && thread_ != master;
      const unsigned copies = __ballot_sync(0xffffffff, is_copy);
      if (copies == 0) continue;
      with_word(params_.copy_width, [&](auto word) {
        warp_copy_to_all<decltype(word)>(row(master_row), is_copy ? row(lane_row) : nullptr,
                                         params_.row_bytes);
      });
      for (unsigned left = params_.num_sf_packs == 0 ? 0 : copies; left != 0; left &= left - 1) {
        const int to = __shfl_sync(0xffffffff, lane_row, __ffs(static_cast<int>(left)) - 1);
        for (int pack = thread_; pack < params_.num_sf_packs; pack += 32) {
          scale(to, pack) = scale(master_row, pack);
        }
      }
    }
  }

  const abi::FinishParams& params_;
  const Call call_;
  const int num_warps_, warp_, thread_;
};

}  // namespace deep_ep::device

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_finish(const __grid_constant__ deep_ep::abi::FinishParams params) {
  if (deep_ep::device::Call(params.context).has_fault()) return;
  deep_ep::device::Finisher(params).run();
}
