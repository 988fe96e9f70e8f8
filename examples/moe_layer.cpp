// A mixture-of-experts layer in C++: four ranks as threads, no Python, no torch.
//
// Each rank has its own tokens and two of the eight experts. dispatch brings every token to the
// ranks of its experts, each expert scales what it received, combine brings the results back and
// sums them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace {

constexpr int kNumRanks = 4, kNumExperts = 8, kNumTokens = 128, kHidden = 256, kNumTopk = 2;

std::uint16_t to_bf16(float value) {  // exact for the small integers below
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

float to_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// What expert `e` makes of a value; stands for its feed-forward network.
float apply_expert(std::int64_t expert, float value) {
  return value * static_cast<float>(expert + 1);
}

// Runs the layer on one rank; returns the number of wrong values.
int run_rank(const std::shared_ptr<deep_ep::Bootstrap>& bootstrap) {
  using namespace deep_ep;
  const int rank = bootstrap->rank_idx();
  EPBuffer buffer(bootstrap,
                  {.num_max_tokens_per_rank = kNumTokens, .hidden = kHidden, .num_topk = kNumTopk});

  // Token i of this rank: the value i % 8 + 1 everywhere, for experts (i + rank) and (i + rank +
  // 3).
  std::vector<std::uint16_t> x(kNumTokens * kHidden);
  std::vector<std::int64_t> topk_idx(kNumTokens * kNumTopk);
  for (int i = 0; i < kNumTokens; ++i) {
    for (int h = 0; h < kHidden; ++h) x[i * kHidden + h] = to_bf16(static_cast<float>(i % 8 + 1));
    topk_idx[i * kNumTopk] = (i + rank) % kNumExperts;
    topk_idx[i * kNumTopk + 1] = (i + rank + 3) % kNumExperts;
  }

  DispatchArgs dispatch;
  dispatch.x = TensorView::matrix(x.data(), DType::kBFloat16, kNumTokens, kHidden);
  dispatch.topk_idx = TensorView::matrix(topk_idx.data(), DType::kInt64, kNumTokens, kNumTopk);
  dispatch.num_experts = kNumExperts;
  dispatch.do_expand = true;  // rows grouped by expert, as a grouped GEMM wants them
  const DispatchOutputs received = buffer.dispatch(dispatch).outputs();
  const EPHandle& handle = *received.handle;

  // The experts write into memory of the buffer, so that the other ranks read their results in
  // place.
  const Tensor y = buffer.empty(handle.num_expanded_tokens, kHidden, DType::kBFloat16);
  std::int64_t row = 0;
  for (int e = 0; e < kNumExperts / kNumRanks; ++e) {
    const std::int64_t end = handle.psum_num_recv_tokens_per_expert.as<std::int32_t>()[e];
    for (; row < end; ++row) {
      for (int h = 0; h < kHidden; ++h) {
        const float value = to_float(received.recv_x.as<std::uint16_t>()[row * kHidden + h]);
        y.as<std::uint16_t>()[row * kHidden + h] =
            to_bf16(apply_expert(rank * (kNumExperts / kNumRanks) + e, value));
      }
    }
  }

  CombineArgs combine;
  combine.x = y.view;
  combine.handle = received.handle;
  const CombineOutputs result = buffer.combine(combine).outputs();

  int num_wrong = 0;
  for (int i = 0; i < kNumTokens; ++i) {
    const float value = to_float(x[i * kHidden]);
    const float expected = apply_expert(topk_idx[i * kNumTopk], value) +
                           apply_expert(topk_idx[i * kNumTopk + 1], value);
    for (int h = 0; h < kHidden; ++h) {
      num_wrong +=
          to_float(result.combined_x.as<std::uint16_t>()[i * kHidden + h]) != expected ? 1 : 0;
    }
  }
  std::printf("rank %d received %lld rows for its experts; %d wrong values of %d\n", rank,
              static_cast<long long>(handle.num_expanded_tokens), num_wrong, kNumTokens * kHidden);
  return num_wrong;
}

}  // namespace

int main() {
  const auto bootstraps = deep_ep::make_thread_bootstraps(kNumRanks);
  std::vector<int> num_wrong(kNumRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back([&, rank] { num_wrong[rank] = run_rank(bootstraps[rank]); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const int wrong : num_wrong) {
    if (wrong != 0) return 1;
  }
  return 0;
}
