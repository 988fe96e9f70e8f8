// Every backend against the reference, bit by bit, over shapes, topologies and ways to call.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/ep_problem.hpp"
#include "conformance/ep_rank.hpp"
#include "support/rank_group.hpp"

namespace deep_ep::testing {
namespace {

EPBufferOptions buffer_options(const ProblemShape& shape, bool allow_multiple_reduction = true) {
  return {.num_max_tokens_per_rank = shape.num_max_tokens_per_rank,
          .hidden = static_cast<int>(shape.hidden),
          .num_topk = shape.num_topk,
          .allow_hybrid_mode = shape.allow_hybrid_mode,
          .allow_multiple_reduction = allow_multiple_reduction,
          .cuda_device = shape.cuda_device,
          .timeout_secs = 20};
}

/// Runs `body` on every rank of the problem, each with its end of one buffer.
void run_problem(const Problem& problem, const EPBufferOptions& options,
                 const std::function<void(EpRank&)>& body) {
  const auto failures =
      run_ranks(make_rank_group(problem.shape.num_scaleout_ranks, problem.shape.num_scaleup_ranks),
                [&](std::shared_ptr<Bootstrap> bootstrap) {
                  EPBuffer buffer(std::move(bootstrap), options);
                  EpRank rank(problem, buffer);
                  body(rank);
                });
  for (const RankFailure& failure : failures) ADD_FAILURE() << failure;
}

/// Whether an expanded output of the worst case has room for every lane.
bool fits_worst_case(const ProblemShape& shape) {
  return shape.selection != Selection::kRepeated || shape.num_topk <= shape.num_local_experts;
}

class EpConformanceTest : public ::testing::TestWithParam<ProblemShape> {
 protected:
  void SetUp() override {
    if (GetParam().cuda_device == kHostMemory) return;
    if (const std::string reason = why_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(EpConformanceTest, CompactDispatchReceivesEachTokenOnceARank) {
  const Problem problem(GetParam());
  run_problem(problem, buffer_options(GetParam()), [&](EpRank& rank) {
    rank.dispatch({});
    rank.dispatch({.use_tma_aligned_col_major_sf = true, .has_topk_weights = false, .num_sms = 2});
    rank.dispatch({.do_cpu_sync = false, .num_sms = 6});
    rank.dispatch({.do_cpu_sync = false, .use_tma_aligned_col_major_sf = true});
    rank.dispatch({.is_async = true, .num_sms = 4});
    rank.dispatch({.do_cpu_sync = false, .is_async = true, .has_topk_weights = false});
  });
}

TEST_P(EpConformanceTest, ExpandedDispatchReceivesEachLaneInTheRowsOfItsExpert) {
  const Problem problem(GetParam());
  run_problem(problem, buffer_options(GetParam()), [&](EpRank& rank) {
    rank.dispatch({.do_expand = true});
    rank.dispatch({.do_expand = true, .do_zero_padding = true, .num_sms = 2});
    rank.dispatch({.do_expand = true,
                   .do_zero_padding = true,
                   .use_tma_aligned_col_major_sf = true,
                   .has_topk_weights = false});
    rank.dispatch({.do_expand = true, .is_async = true, .num_sms = 4});
    if (!fits_worst_case(GetParam())) return;
    rank.dispatch({.do_expand = true, .do_cpu_sync = false, .num_sms = 6});
    rank.dispatch({.do_expand = true,
                   .do_cpu_sync = false,
                   .is_async = true,
                   .do_zero_padding = true,
                   .use_tma_aligned_col_major_sf = true});
  });
}

TEST_P(EpConformanceTest, CachedDispatchSendsOtherDataTheSameWay) {
  const ProblemShape& shape = GetParam();
  const Problem problem(shape);
  const DispatchData bf16 = problem.make_data(11, DType::kBFloat16, shape.hidden + 3, 0);
  const DispatchData fp8 = problem.make_data(12, DType::kFloat8E4M3, 34, 3);
  run_problem(problem, buffer_options(shape), [&](EpRank& rank) {
    for (const bool do_expand : {false, true}) {
      for (const bool do_cpu_sync : {true, false}) {
        if (do_expand && !do_cpu_sync && !fits_worst_case(shape)) continue;
        const auto handle = rank.dispatch({.do_expand = do_expand, .do_cpu_sync = do_cpu_sync});
        rank.dispatch_cached(handle, bf16, {.do_expand = do_expand, .has_topk_weights = false});
        rank.dispatch_cached(handle, fp8,
                             {.do_expand = do_expand,
                              .do_zero_padding = do_expand,
                              .use_tma_aligned_col_major_sf = true,
                              .num_sms = 2});
        rank.dispatch_cached(handle, problem.data, {.do_expand = do_expand, .is_async = true});
      }
    }
  });
}

TEST_P(EpConformanceTest, CombineAddsAndRoundsLikeTheReference) {
  const ProblemShape& shape = GetParam();
  const Problem problem(shape);
  for (const bool allow_multiple_reduction : {true, false}) {
    std::vector<CombineCase> compact, expanded;
    for (int num_biases = 0; num_biases <= 2; ++num_biases) {
      const auto seed = static_cast<std::uint64_t>(20 + num_biases);
      compact.emplace_back(problem, seed, shape.hidden, false, num_biases,
                           allow_multiple_reduction);
      expanded.emplace_back(problem, seed, shape.hidden, true, num_biases,
                            allow_multiple_reduction);
    }
    run_problem(problem, buffer_options(shape, allow_multiple_reduction), [&](EpRank& rank) {
      SCOPED_TRACE(allow_multiple_reduction ? "multiple reduction" : "single reduction");
      for (const bool do_expand : {false, true}) {
        SCOPED_TRACE(do_expand ? "expanded" : "compact");
        const auto& cases = do_expand ? expanded : compact;
        const auto handle = rank.dispatch({.do_expand = do_expand});
        rank.combine(handle, cases[0], {});
        rank.combine(handle, cases[0], {.is_lent = true, .num_sms = 2});
        rank.combine(handle, cases[1], {.has_topk_weights = false, .num_sms = 6});
        rank.combine(handle, cases[2], {.is_lent = true, .is_async = true});
        rank.combine(handle, cases[2], {.is_async = true, .defer_epilogue = true});
      }
    });
  }
}

TEST_P(EpConformanceTest, CombineAfterADispatchWithoutCpuSyncReadsOnlyReceivedRows) {
  const ProblemShape& shape = GetParam();
  const Problem problem(shape);
  const CombineCase compact(problem, 30, shape.hidden, false, 1, true);
  const CombineCase expanded(problem, 31, shape.hidden, true, 1, true);
  run_problem(problem, buffer_options(shape), [&](EpRank& rank) {
    for (const bool do_expand : {false, true}) {
      if (do_expand && !fits_worst_case(shape)) continue;
      SCOPED_TRACE(do_expand ? "expanded" : "compact");
      const auto& combine_case = do_expand ? expanded : compact;
      const auto handle = rank.dispatch({.do_expand = do_expand, .do_cpu_sync = false});
      rank.combine(handle, combine_case, {});
      rank.combine(handle, combine_case, {.is_lent = true, .is_async = true});
    }
  });
}

TEST_P(EpConformanceTest, CallsRunInOrderEvenIfNobodyWaitsBetween) {
  const ProblemShape& shape = GetParam();
  const Problem problem(shape);
  const DispatchData other = problem.make_data(40, DType::kBFloat16, 16, 0);
  const CombineCase compact(problem, 41, shape.hidden, false, 2, true);
  const CombineCase expanded(problem, 42, 40, true, 1, true);
  run_problem(problem, buffer_options(shape), [&](EpRank& rank) {
    const DispatchMode compact_mode{.is_async = true};
    const DispatchMode expanded_mode{.do_expand = true, .is_async = true};
    const CombineMode combine_mode{.is_async = true};
    const auto compact_handle = rank.dispatch(compact_mode);
    const auto expanded_handle = rank.dispatch(expanded_mode);

    const PendingDispatch first = rank.start(problem.data, compact_mode);
    const PendingCombine second = rank.start(compact_handle, compact, combine_mode);
    const PendingDispatch third = rank.start(other, expanded_mode);
    const PendingCombine fourth = rank.start(expanded_handle, expanded, combine_mode);
    const PendingCombine fifth = rank.start(compact_handle, compact, combine_mode);
    rank.check(compact, combine_mode, fifth);
    rank.check(expanded, combine_mode, fourth);
    rank.check(other, expanded_mode, third);
    rank.check(compact, combine_mode, second);
    rank.check(problem.data, compact_mode, first);
  });
}

std::vector<ProblemShape> all_shapes() {
  constexpr DType kFp8 = DType::kFloat8E4M3, kInt32 = DType::kInt32;
  std::vector<ProblemShape> shapes;
  // One rank.
  shapes.push_back({.hidden = 8, .num_topk = 1, .num_local_experts = 1});
  shapes.push_back({.hidden = 24, .num_topk = 6, .num_local_experts = 8, .expert_alignment = 8});
  // One domain: rank counts, widths and odd sizes.
  shapes.push_back({.num_scaleup_ranks = 2});
  shapes.push_back({.num_scaleup_ranks = 2, .hidden = 1, .num_topk = 2, .num_local_experts = 1});
  shapes.push_back({.num_scaleup_ranks = 2, .hidden = 7, .num_topk = 32, .num_local_experts = 32});
  shapes.push_back({.num_scaleup_ranks = 2,
                    .hidden = 7168,
                    .num_topk = 8,
                    .num_local_experts = 16,
                    .expert_alignment = 128,
                    .num_max_tokens_per_rank = 9});
  shapes.push_back({.num_scaleup_ranks = 3,
                    .idx_dtype = kInt32,
                    .hidden = 24,
                    .num_topk = 5,
                    .num_local_experts = 3,
                    .expert_alignment = 7});
  shapes.push_back({.num_scaleup_ranks = 3, .hidden = 8, .selection = Selection::kRepeated});
  shapes.push_back({.num_scaleup_ranks = 4,
                    .hidden = 2880,
                    .num_topk = 4,
                    .num_local_experts = 8,
                    .expert_alignment = 4,
                    .counts = TokenCounts::kFull});
  shapes.push_back({.num_scaleup_ranks = 8,
                    .num_topk = 8,
                    .num_local_experts = 32,
                    .expert_alignment = 16,
                    .num_max_tokens_per_rank = 33,
                    .selection = Selection::kWithGaps});
  shapes.push_back({.num_scaleup_ranks = 8, .num_topk = 32, .num_local_experts = 1});
  // FP8 with scales of every layout.
  shapes.push_back({.num_scaleup_ranks = 2, .x_dtype = kFp8, .hidden = 2, .num_sf_packs = 1});
  shapes.push_back({.num_scaleup_ranks = 2,
                    .x_dtype = kFp8,
                    .hidden = 7168,
                    .num_topk = 8,
                    .num_local_experts = 8,
                    .expert_alignment = 4,
                    .num_max_tokens_per_rank = 9,
                    .num_sf_packs = 56,
                    .sf_layout = ScaleLayout::kColMajor});
  shapes.push_back({.num_scaleup_ranks = 4,
                    .x_dtype = kFp8,
                    .hidden = 256,
                    .num_topk = 3,
                    .expert_alignment = 3,
                    .selection = Selection::kRepeated,
                    .num_sf_packs = 5,
                    .sf_dtype = kInt32,
                    .sf_layout = ScaleLayout::kPadded});
  shapes.push_back({.num_scaleup_ranks = 3, .x_dtype = kFp8, .hidden = 30});
  // Where nothing, or all of it, goes to one place.
  for (const int num_domains : {1, 2}) {
    for (const auto& [counts, selection] : {std::pair{TokenCounts::kNone, Selection::kDistinct},
                                            {TokenCounts::kFull, Selection::kNone},
                                            {TokenCounts::kFull, Selection::kOneExpert},
                                            {TokenCounts::kOneSender, Selection::kDistinct},
                                            {TokenCounts::kUneven, Selection::kWithGaps}}) {
      shapes.push_back({.num_scaleout_ranks = num_domains,
                        .num_scaleup_ranks = 2,
                        .hidden = 24,
                        .num_topk = 3,
                        .num_local_experts = 4,
                        .expert_alignment = 4,
                        .counts = counts,
                        .selection = selection});
    }
  }
  // Several domains, and what they are without hybrid mode.
  for (const bool allow_hybrid_mode : {true, false}) {
    shapes.push_back({.num_scaleout_ranks = 2,
                      .num_scaleup_ranks = 2,
                      .allow_hybrid_mode = allow_hybrid_mode,
                      .num_topk = 6,
                      .num_local_experts = 4});
    shapes.push_back({.num_scaleout_ranks = 3,
                      .num_scaleup_ranks = 2,
                      .allow_hybrid_mode = allow_hybrid_mode,
                      .hidden = 24,
                      .num_topk = 8,
                      .num_local_experts = 4,
                      .expert_alignment = 8,
                      .selection = Selection::kRepeated});
  }
  shapes.push_back({.num_scaleout_ranks = 2, .num_scaleup_ranks = 1, .hidden = 8, .num_topk = 2});
  shapes.push_back({.num_scaleout_ranks = 3,
                    .num_scaleup_ranks = 1,
                    .x_dtype = kFp8,
                    .idx_dtype = kInt32,
                    .hidden = 128,
                    .num_sf_packs = 4,
                    .sf_layout = ScaleLayout::kColMajor});
  shapes.push_back({.num_scaleout_ranks = 2,
                    .num_scaleup_ranks = 4,
                    .hidden = 2880,
                    .num_topk = 8,
                    .num_local_experts = 4,
                    .expert_alignment = 16,
                    .counts = TokenCounts::kFull});
  shapes.push_back({.num_scaleout_ranks = 4,
                    .num_scaleup_ranks = 2,
                    .hidden = 7,
                    .num_topk = 16,
                    .num_local_experts = 3,
                    .num_max_tokens_per_rank = 40,
                    .selection = Selection::kWithGaps});
  shapes.push_back({.num_scaleout_ranks = 2,
                    .num_scaleup_ranks = 2,
                    .x_dtype = kFp8,
                    .hidden = 7168,
                    .num_topk = 8,
                    .num_local_experts = 16,
                    .expert_alignment = 128,
                    .num_max_tokens_per_rank = 7,
                    .num_sf_packs = 14,
                    .sf_dtype = kInt32,
                    .sf_layout = ScaleLayout::kPadded});
  return shapes;
}

std::vector<ProblemShape> on_gpu(std::vector<ProblemShape> shapes) {
  for (ProblemShape& shape : shapes) shape.cuda_device = 0;
  return shapes;
}

std::string name_of(const ::testing::TestParamInfo<ProblemShape>& test) {
  return test.param.name();
}

INSTANTIATE_TEST_SUITE_P(Cpu, EpConformanceTest, ::testing::ValuesIn(all_shapes()), name_of);
// Ranks share one GPU, each with a stream of its own.
INSTANTIATE_TEST_SUITE_P(Cuda, EpConformanceTest, ::testing::ValuesIn(on_gpu(all_shapes())),
                         name_of);

}  // namespace
}  // namespace deep_ep::testing
