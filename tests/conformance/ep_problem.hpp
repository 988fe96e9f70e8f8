#pragma once
// Problems for dispatch and combine: the data of all ranks, from a seed.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/ep_reference.hpp"
#include "core/float_formats.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::testing {

enum class TokenCounts { kFull, kUneven, kOneSender, kNone };
enum class Selection { kDistinct, kWithGaps, kOneExpert, kRepeated, kNone };
enum class ScaleLayout { kRowMajor, kColMajor, kPadded };

/// The shape of a problem: what the id of a test tells.
struct ProblemShape {
  int num_scaleout_ranks = 1, num_scaleup_ranks = 1;
  bool allow_hybrid_mode = true;
  DType x_dtype = DType::kBFloat16, idx_dtype = DType::kInt64;
  std::int64_t hidden = 128;
  int num_topk = 4, num_local_experts = 2, expert_alignment = 1;
  int num_max_tokens_per_rank = 12;
  TokenCounts counts = TokenCounts::kUneven;
  Selection selection = Selection::kDistinct;
  std::int64_t num_sf_packs = 0;
  DType sf_dtype = DType::kFloat32;
  ScaleLayout sf_layout = ScaleLayout::kRowMajor;
  int cuda_device = kHostMemory;

  int num_ranks() const { return num_scaleout_ranks * num_scaleup_ranks; }
  int num_experts() const { return num_local_experts * num_ranks(); }
  Topology logical_topology() const {
    const bool is_hybrid = allow_hybrid_mode;
    return {.rank_idx = 0,
            .num_ranks = num_ranks(),
            .num_scaleout_ranks = is_hybrid ? num_scaleout_ranks : 1,
            .num_scaleup_ranks = is_hybrid ? num_scaleup_ranks : num_ranks()};
  }
  std::string name() const {
    constexpr const char* kCounts[] = {"full", "uneven", "one_sender", "no_tokens"};
    constexpr const char* kSelections[] = {"distinct", "gaps", "one_expert", "repeated",
                                           "unrouted"};
    constexpr const char* kLayouts[] = {"row", "col", "padded"};
    std::string text = "ranks" + std::to_string(num_scaleout_ranks) + "x" +
                       std::to_string(num_scaleup_ranks) + (allow_hybrid_mode ? "" : "_direct");
    text += x_dtype == DType::kBFloat16 ? "_bf16" : "_fp8";
    if (num_sf_packs > 0) {
      text += "_sf" + std::to_string(num_sf_packs) + kLayouts[static_cast<int>(sf_layout)];
    }
    if (idx_dtype == DType::kInt32) text += "_ids32";
    text += "_hidden" + std::to_string(hidden) + "_topk" + std::to_string(num_topk) + "_experts" +
            std::to_string(num_experts()) + "_align" + std::to_string(expert_alignment);
    text += std::string("_") + kCounts[static_cast<int>(counts)] + "_" +
            kSelections[static_cast<int>(selection)];
    return text;
  }
  friend std::ostream& operator<<(std::ostream& out, const ProblemShape& shape) {
    return out << shape.name();
  }
};

/// Numbers that depend on nothing but the seed, on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  /// In 0..limit-1.
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }
  std::uint32_t word() { return static_cast<std::uint32_t>(engine_()); }
  /// A finite value. Some are so large that FP32 loses the others until an opposite one comes, so
  /// that the order of a sum shows in its bits; the mantissas of the others give ties when they are
  /// rounded.
  std::uint16_t bf16() {
    const std::uint32_t bits = word();
    const std::uint32_t sign = bits & 0x8000, choice = (bits >> 16) % 64;
    if (choice == 0) return static_cast<std::uint16_t>(sign);  // a zero of either sign
    if (choice < 16) return static_cast<std::uint16_t>(sign | (127 + 24) << 7);
    const std::uint32_t exponent = 127 - 3 + (bits >> 22) % 7;
    return static_cast<std::uint16_t>(sign | exponent << 7 | (bits & 0x7f));
  }
  float weight() { return static_cast<float>(word() >> 8) * 0x1p-24f; }

 private:
  std::mt19937_64 engine_;
};

/// What all ranks send in one dispatch.
struct DispatchData {
  DType x_dtype = DType::kBFloat16;
  std::int64_t hidden = 0;
  std::int64_t num_sf_packs = 0;
  DType sf_dtype = DType::kFloat32;
  std::vector<reference::DispatchInput> inputs;

  std::int64_t row_bytes() const { return hidden * size_of(x_dtype); }
};

/// A routing and data for it.
struct Problem {
  explicit Problem(const ProblemShape& problem_shape, std::uint64_t seed = 1)
      : shape(problem_shape), routing(make_routing(seed)) {
    for (const auto& rank : routing.ranks) {
      narrow_topk_idx.emplace_back(rank.topk_idx.begin(), rank.topk_idx.end());
    }
    data = make_data(seed + 1, shape.x_dtype, shape.hidden, shape.num_sf_packs);
  }

  std::int64_t num_tokens(int rank_idx) const {
    return routing.ranks[static_cast<std::size_t>(rank_idx)].num_tokens;
  }

  DispatchData make_data(std::uint64_t seed, DType x_dtype, std::int64_t hidden,
                         std::int64_t num_sf_packs) const {
    Random random(seed);
    DispatchData result{.x_dtype = x_dtype,
                        .hidden = hidden,
                        .num_sf_packs = num_sf_packs,
                        .sf_dtype = shape.sf_dtype,
                        .inputs = {}};
    for (const auto& rank : routing.ranks) {
      const std::int64_t num_tokens = rank.num_tokens;
      reference::DispatchInput input;
      for (std::int64_t i = 0; i < num_tokens * result.row_bytes(); ++i) {
        input.x.push_back(static_cast<std::byte>(random.below(256)));
      }
      switch (shape.sf_layout) {
        case ScaleLayout::kRowMajor:
          input.sf_token_stride = num_sf_packs;
          break;
        case ScaleLayout::kColMajor:
          input.sf_token_stride = 1;
          input.sf_pack_stride = std::max<std::int64_t>(num_tokens, 1);
          break;
        case ScaleLayout::kPadded:
          input.sf_token_stride = 2 * num_sf_packs + 3;
          input.sf_pack_stride = 2;
          break;
      }
      const std::int64_t num_packs =
          num_tokens * input.sf_token_stride + num_sf_packs * input.sf_pack_stride;
      for (std::int64_t i = 0; num_sf_packs > 0 && i < num_packs; ++i) {
        input.x_sf.push_back(random.word());
      }
      for (std::size_t i = 0; i < rank.topk_idx.size(); ++i) {
        input.topk_weights.push_back(random.weight());
      }
      result.inputs.push_back(std::move(input));
    }
    return result;
  }

  /// Expert outputs for every row, and biases. Padding rows are NaN: a sum that reads them shows
  /// it.
  std::vector<reference::CombineInput> make_combine_inputs(std::uint64_t seed, std::int64_t hidden,
                                                           bool do_expand, int num_biases) const {
    Random random(seed);
    std::vector<reference::CombineInput> inputs;
    for (const auto& rank : routing.ranks) {
      reference::CombineInput input;
      for (const auto& source : do_expand ? rank.expanded_rows : rank.compact_rows) {
        for (std::int64_t i = 0; i < hidden; ++i) {
          input.x.push_back(source.is_padding() ? std::uint16_t{0x7fff} : random.bf16());
        }
        for (int i = 0; i < (do_expand ? 1 : shape.num_topk); ++i) {
          input.topk_weights.push_back(random.weight());
        }
      }
      for (int i = 0; i < num_biases; ++i) {
        auto& bias = input.bias[static_cast<std::size_t>(i)];
        for (std::int64_t j = 0; j < rank.num_tokens * hidden; ++j) bias.push_back(random.bf16());
      }
      inputs.push_back(std::move(input));
    }
    return inputs;
  }

  ProblemShape shape;
  reference::Routing routing;
  std::vector<std::vector<std::int32_t>> narrow_topk_idx;  ///< topk_idx of each rank as int32
  DispatchData data;

 private:
  int choose_num_tokens(int rank_idx) const {
    const int most = shape.num_max_tokens_per_rank;
    switch (shape.counts) {
      case TokenCounts::kFull:
        return most;
      case TokenCounts::kUneven:
        return std::vector<int>{most, 0, most / 2, 1,
                                most - 1}[static_cast<std::size_t>(rank_idx) % 5];
      case TokenCounts::kOneSender:
        return rank_idx == shape.num_ranks() - 1 ? most : 0;
      case TokenCounts::kNone:
        return 0;
    }
    return 0;
  }

  std::vector<std::int64_t> choose_experts(Random& random, std::int64_t token_idx) const {
    const std::int64_t num_experts = shape.num_experts();
    std::vector<std::int64_t> row(static_cast<std::size_t>(shape.num_topk), -1);
    switch (shape.selection) {
      case Selection::kWithGaps:
        if (token_idx % 4 == 1) return row;
        [[fallthrough]];
      case Selection::kDistinct: {
        std::vector<std::int64_t> experts(static_cast<std::size_t>(num_experts));
        std::iota(experts.begin(), experts.end(), 0);
        for (std::size_t lane = 0; lane < std::min(row.size(), experts.size()); ++lane) {
          const auto other = lane + static_cast<std::size_t>(random.below(
                                        std::ssize(experts) - static_cast<std::int64_t>(lane)));
          std::swap(experts[lane], experts[other]);
          const bool is_gap = shape.selection == Selection::kWithGaps && random.below(3) == 0;
          row[lane] = is_gap ? -1 - random.below(100) : experts[lane];
        }
        return row;
      }
      case Selection::kOneExpert:
        row[static_cast<std::size_t>(token_idx % shape.num_topk)] = num_experts - 1;
        return row;
      case Selection::kRepeated: {
        const std::int64_t first = random.below(num_experts);
        for (std::int64_t& expert_idx : row) {
          if (random.below(8) != 0) expert_idx = (first + random.below(3)) % num_experts;
        }
        return row;
      }
      case Selection::kNone:
        return row;
    }
    return row;
  }

  reference::Routing make_routing(std::uint64_t seed) const {
    Random random(seed);
    std::vector<std::vector<std::int64_t>> topk_idx(static_cast<std::size_t>(shape.num_ranks()));
    for (int rank_idx = 0; rank_idx < shape.num_ranks(); ++rank_idx) {
      auto& ids = topk_idx[static_cast<std::size_t>(rank_idx)];
      for (int token_idx = 0; token_idx < choose_num_tokens(rank_idx); ++token_idx) {
        const auto row = choose_experts(random, token_idx);
        ids.insert(ids.end(), row.begin(), row.end());
      }
    }
    return reference::make_routing({.topology = shape.logical_topology(),
                                    .num_experts = shape.num_experts(),
                                    .num_topk = shape.num_topk,
                                    .num_max_tokens_per_rank = shape.num_max_tokens_per_rank,
                                    .expert_alignment = shape.expert_alignment},
                                   topk_idx);
  }
};

}  // namespace deep_ep::testing
