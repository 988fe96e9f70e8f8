#include "core/ep_reference.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/float_formats.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::reference {
namespace {

using Ids = std::vector<std::int64_t>;
using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

RoutingOptions make_options(int num_scaleout_ranks, int num_scaleup_ranks, int num_experts,
                            int num_topk, std::int64_t expert_alignment = 1) {
  return {.topology = {.num_ranks = num_scaleout_ranks * num_scaleup_ranks,
                       .num_scaleout_ranks = num_scaleout_ranks,
                       .num_scaleup_ranks = num_scaleup_ranks},
          .num_experts = num_experts,
          .num_topk = num_topk,
          .num_max_tokens_per_rank = 4,
          .expert_alignment = expert_alignment};
}

BF16Row bf16(const Floats& values) {
  BF16Row row;
  for (const float value : values) row.push_back(bf16_from_float(value));
  return row;
}

Floats to_floats(const BF16Row& row) {
  Floats values;
  for (const std::uint16_t bits : row) values.push_back(float_from_bf16(bits));
  return values;
}

std::vector<std::byte> bytes(const std::vector<int>& values) {
  std::vector<std::byte> result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

// Rank 0 has experts 0 and 1, rank 1 has 2 and 3. Rank 0 sends three tokens: one to both ranks, one
// that names expert 2 twice, one without expert. Rank 1 sends one token to both experts of rank 0.
Routing two_ranks() {
  return make_routing(make_options(1, 2, 4, 2, 2), {{0, 3, 2, 2, -1, -1}, {1, 0}});
}

TEST(EpReferenceRoutingTest, CompactRowsAreOrderedBySourceRankAndToken) {
  const Routing routing = two_ranks();
  EXPECT_EQ(routing.ranks[0].compact_rows, (std::vector<RowSource>{{0, 0, -1}, {1, 0, -1}}));
  EXPECT_EQ(routing.ranks[1].compact_rows, (std::vector<RowSource>{{0, 0, -1}, {0, 1, -1}}));
  EXPECT_EQ(routing.ranks[0].recv_topk_idx, (Ids{0, -1, 1, 0}));
  EXPECT_EQ(routing.ranks[1].recv_topk_idx, (Ids{-1, 1, 0, 0}));
}

TEST(EpReferenceRoutingTest, ExpandedRowsAreGroupedByExpertAndAligned) {
  const Routing routing = two_ranks();
  const RowSource padding;
  EXPECT_EQ(routing.ranks[0].expanded_rows,
            (std::vector<RowSource>{{0, 0, 0}, {1, 0, 1}, {1, 0, 0}, padding}));
  EXPECT_EQ(routing.ranks[1].expanded_rows,
            (std::vector<RowSource>{{0, 1, 0}, {0, 1, 1}, {0, 0, 1}, padding}));
}

TEST(EpReferenceRoutingTest, CountsAndPrefixSumsFollowBothMeanings) {
  for (const RankRouting& rank : two_ranks().ranks) {
    EXPECT_EQ(rank.num_unaligned_recv_tokens_per_expert, (Ints{2, 1}));
    EXPECT_EQ(rank.num_recv_tokens_per_expert, (Ids{2, 2}));
    EXPECT_EQ(rank.compact_psum_num_recv_tokens_per_expert, (Ints{2, 4}));
    EXPECT_EQ(rank.expanded_psum_num_recv_tokens_per_expert, (Ints{2, 3}));
  }
  EXPECT_EQ(two_ranks().ranks[0].psum_num_recv_tokens_per_scaleup_rank, (Ints{1, 2}));
  EXPECT_EQ(two_ranks().ranks[1].psum_num_recv_tokens_per_scaleup_rank, (Ints{2, 2}));
}

TEST(EpReferenceRoutingTest, MetadataNamesTokenHighestLaneAndExpandedRows) {
  const Routing routing = two_ranks();
  EXPECT_EQ(routing.ranks[0].recv_src_metadata, (Ints{0, 0, 0, -1, 4, 3, 2, 1}));
  EXPECT_EQ(routing.ranks[1].recv_src_metadata, (Ints{0, 1, -1, 2, 1, 1, 0, 1}));
}

TEST(EpReferenceRoutingTest, SendersKnowTheRowOfEachLane) {
  const Routing routing = two_ranks();
  EXPECT_EQ(routing.ranks[0].compact_dst_rows, (Ints{0, 0, 1, 1, -1, -1}));
  EXPECT_EQ(routing.ranks[0].expanded_dst_rows, (Ints{0, 2, 0, 1, -1, -1}));
  EXPECT_EQ(routing.ranks[1].compact_dst_rows, (Ints{1, 1}));
  EXPECT_EQ(routing.ranks[1].expanded_dst_rows, (Ints{2, 1}));
}

TEST(EpReferenceRoutingTest, AnExpertWithoutTokensTakesNoRowsWhateverTheAlignment) {
  const Routing routing = make_routing(make_options(1, 1, 3, 1, 8), {{2, 0}});
  EXPECT_EQ(routing.ranks[0].num_recv_tokens_per_expert, (Ids{8, 0, 8}));
  EXPECT_EQ(routing.ranks[0].compact_psum_num_recv_tokens_per_expert, (Ints{8, 8, 16}));
  EXPECT_EQ(routing.ranks[0].expanded_psum_num_recv_tokens_per_expert, (Ints{1, 8, 9}));
  EXPECT_EQ(routing.ranks[0].expanded_rows.size(), 16u);
  EXPECT_EQ(routing.ranks[0].expanded_dst_rows, (Ints{8, 0}));
}

TEST(EpReferenceRoutingTest, DomainsDoNotChangeTheOrderOfRowsButCountByScaleupRank) {
  // Ranks 0 and 2 have scale-up index 0; rank 3 sends two tokens; all tokens go to rank 1.
  const Routing routing = make_routing(make_options(2, 2, 4, 1), {{1}, {}, {1}, {1, 1}});
  EXPECT_EQ(routing.ranks[1].compact_rows,
            (std::vector<RowSource>{{0, 0, -1}, {2, 0, -1}, {3, 0, -1}, {3, 1, -1}}));
  EXPECT_EQ(routing.ranks[1].psum_num_recv_tokens_per_scaleup_rank, (Ints{2, 4}));
  EXPECT_EQ(routing.ranks[0].psum_num_recv_tokens_per_scaleup_rank, (Ints{0, 0}));
}

TEST(EpReferenceRoutingTest, RanksWithoutTokensSendAndReceiveNothing) {
  const Routing routing = make_routing(make_options(1, 2, 4, 3, 4), {{}, {}});
  for (const RankRouting& rank : routing.ranks) {
    EXPECT_TRUE(rank.compact_rows.empty());
    EXPECT_TRUE(rank.expanded_rows.empty());
    EXPECT_TRUE(rank.recv_src_metadata.empty());
    EXPECT_EQ(rank.expanded_psum_num_recv_tokens_per_expert, (Ints{0, 0}));
    EXPECT_EQ(rank.psum_num_recv_tokens_per_scaleup_rank, (Ints{0, 0}));
  }
}

TEST(EpReferenceRoutingTest, IdsOutsideTheExpertsSelectNothing) {
  const Routing routing = make_routing(make_options(1, 2, 4, 2), {{-7, 4, 3, 1000}, {}});
  EXPECT_TRUE(routing.ranks[0].compact_rows.empty());
  EXPECT_EQ(routing.ranks[1].compact_rows, (std::vector<RowSource>{{0, 1, -1}}));
  EXPECT_EQ(routing.ranks[0].compact_dst_rows, (Ints{-1, -1, 0, -1}));
}

TEST(EpReferenceRoutingTest, RefusesShapesThatDoNotFit) {
  EXPECT_THROW(make_routing(make_options(1, 2, 3, 1), {{}, {}}), Error);
  EXPECT_THROW(make_routing(make_options(1, 2, 4, 1), {{}}), Error);
  EXPECT_THROW(make_routing(make_options(1, 2, 4, 2), {{0, 1, 2}, {}}), Error);
  EXPECT_THROW(make_routing(make_options(1, 1, 4, 1), {{0, 0, 0, 0, 0}}), Error);
  EXPECT_THROW(make_routing(make_options(1, 1, 4, 1, 0), {{}}), Error);
}

std::vector<DispatchInput> two_ranks_data() {
  return {{.x = bytes({10, 11, 20, 21, 30, 31}),
           .x_sf = {100, 200, 300, 101, 201, 301},  // column-major, [3, 2]
           .sf_token_stride = 1,
           .sf_pack_stride = 3,
           .topk_weights = {0.5f, 0.25f, 0.75f, 0.125f, 9, 9}},
          {.x = bytes({40, 41}),
           .x_sf = {400, 401},  // row-major, [1, 2]
           .sf_token_stride = 2,
           .topk_weights = {1.5f, 2.5f}}};
}

TEST(EpReferenceDispatchTest, CompactOutputsHaveOneRowAReceivedToken) {
  const auto outputs =
      dispatch(two_ranks(), {.hidden_bytes = 2, .num_sf_packs = 2, .has_topk_weights = true},
               two_ranks_data());
  EXPECT_EQ(outputs[0].x, bytes({10, 11, 40, 41}));
  EXPECT_EQ(outputs[1].x, bytes({10, 11, 20, 21}));
  EXPECT_EQ(outputs[0].x_sf, (std::vector<std::uint32_t>{100, 101, 400, 401}));
  EXPECT_EQ(outputs[1].x_sf, (std::vector<std::uint32_t>{100, 101, 200, 201}));
  EXPECT_EQ(outputs[0].topk_weights, (Floats{0.5f, 0.25f, 1.5f, 2.5f}));
  EXPECT_EQ(outputs[1].topk_weights, (Floats{0.5f, 0.25f, 0.75f, 0.125f}));
}

TEST(EpReferenceDispatchTest, ExpandedOutputsHaveOneRowALaneAndZeroPadding) {
  const auto outputs =
      dispatch(two_ranks(),
               {.hidden_bytes = 2, .num_sf_packs = 2, .has_topk_weights = true, .do_expand = true},
               two_ranks_data());
  EXPECT_EQ(outputs[0].x, bytes({10, 11, 40, 41, 40, 41, 0, 0}));
  EXPECT_EQ(outputs[1].x, bytes({20, 21, 20, 21, 10, 11, 0, 0}));
  EXPECT_EQ(outputs[1].x_sf, (std::vector<std::uint32_t>{200, 201, 200, 201, 100, 101, 0, 0}));
  EXPECT_EQ(outputs[0].topk_weights, (Floats{0.5f, 2.5f, 1.5f, 0}));
  EXPECT_EQ(outputs[1].topk_weights, (Floats{0.75f, 0.125f, 0.25f, 0}));
}

TEST(EpReferenceDispatchTest, WithoutScalesAndWeightsNoneAreReceived) {
  const auto outputs = dispatch(two_ranks(), {.hidden_bytes = 2}, two_ranks_data());
  EXPECT_TRUE(outputs[0].x_sf.empty());
  EXPECT_TRUE(outputs[0].topk_weights.empty());
}

TEST(EpReferenceDispatchTest, TmaColumnsAreAlignedToFourPacks) {
  EXPECT_EQ(to_tma_col_major({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 5, 2),
            (std::vector<std::uint32_t>{1, 3, 5, 7, 9, 0, 0, 0, 2, 4, 6, 8, 10, 0, 0, 0}));
}

// 1 + kTiny is a tie that BF16 rounds to 1; 1 + 2 * kTiny is the next BF16 value.
constexpr float kTiny = 0x1p-8f;
// kHuge + 1 is a tie that FP32 rounds to kHuge.
constexpr float kHuge = 0x1p24f;

/// Combines one token of rank 0, one column wide. `rows[rank]` are the rows that rank gives back.
float combine_one(const RoutingOptions& options, const Ids& ids, const std::vector<Floats>& rows,
                  CombineOptions combine_options, const std::vector<float>& bias = {}) {
  std::vector<Ids> topk_idx(rows.size());
  topk_idx[0] = ids;
  std::vector<CombineInput> inputs(rows.size());
  for (std::size_t rank_idx = 0; rank_idx < rows.size(); ++rank_idx) {
    inputs[rank_idx].x = bf16(rows[rank_idx]);
  }
  for (std::size_t i = 0; i < bias.size(); ++i) inputs[0].bias[i] = bf16({bias[i]});
  combine_options.hidden = 1;
  const auto outputs = combine(make_routing(options, topk_idx), combine_options, inputs);
  EXPECT_EQ(outputs[0].x.size(), 1u);
  return float_from_bf16(outputs[0].x[0]);
}

TEST(EpReferenceCombineTest, MultipleReductionRoundsTheSumOfEachRank) {
  const RoutingOptions options = make_options(1, 2, 4, 3);
  const std::vector<Floats> rows = {{1, kTiny}, {kTiny}};
  EXPECT_EQ(combine_one(options, {0, 1, 2}, rows, {.do_expand = true}), 1.0f);
  EXPECT_EQ(
      combine_one(options, {0, 1, 2}, rows, {.do_expand = true, .allow_multiple_reduction = false}),
      1 + 2 * kTiny);
}

TEST(EpReferenceCombineTest, CompactRowsInOneDomainAreRoundedOnce) {
  const RoutingOptions options = make_options(1, 3, 3, 3);
  EXPECT_EQ(combine_one(options, {0, 1, 2}, {{1}, {kTiny}, {kTiny}}, {}), 1 + 2 * kTiny);
}

TEST(EpReferenceCombineTest, DomainsRoundTheirSumUnlessOneReductionIsAskedFor) {
  const RoutingOptions options = make_options(2, 2, 4, 3);
  const std::vector<Floats> rows = {{1}, {kTiny}, {kTiny}, {}};
  for (const bool do_expand : {false, true}) {
    EXPECT_EQ(combine_one(options, {0, 1, 2}, rows, {.do_expand = do_expand}), 1.0f);
    EXPECT_EQ(combine_one(options, {0, 1, 2}, rows,
                          {.do_expand = do_expand, .allow_multiple_reduction = false}),
              1 + 2 * kTiny);
  }
}

TEST(EpReferenceCombineTest, ThreeLevelsRoundThreeTimes) {
  // Rank 0: 1 + tiny -> 1. Domain 0: 1 + tiny -> 1. All: 1 + tiny -> 1. In one sum: 1 + 3 * tiny, a
  // tie between 1 + 2 * tiny and 1 + 4 * tiny that goes to the even one, the latter.
  const RoutingOptions options = make_options(2, 2, 8, 4);
  const std::vector<Floats> rows = {{1, kTiny}, {kTiny}, {kTiny}, {}};
  EXPECT_EQ(combine_one(options, {0, 1, 2, 4}, rows, {.do_expand = true}), 1.0f);
  EXPECT_EQ(combine_one(options, {0, 1, 2, 4}, rows,
                        {.do_expand = true, .allow_multiple_reduction = false}),
            1 + 4 * kTiny);
}

TEST(EpReferenceCombineTest, RanksAreAddedInTheOrderOfTheirHighestLanes) {
  // Rank 0 has lanes 0 and 3, so it comes last: (huge - huge) + 1.
  const RoutingOptions options = make_options(1, 3, 6, 4);
  EXPECT_EQ(combine_one(options, {0, 2, 4, 1}, {{1}, {kHuge}, {-kHuge}}, {}), 1.0f);
  EXPECT_EQ(combine_one(options, {0, 2, 4, -1}, {{1}, {kHuge}, {-kHuge}}, {}), 0.0f);
}

TEST(EpReferenceCombineTest, DomainsAreAddedInTheOrderOfTheirHighestLanes) {
  // Domain 0 has lanes 0 and 3 on different ranks: its 1 + 0 comes last.
  const RoutingOptions options = make_options(3, 2, 6, 4);
  const std::vector<Floats> rows = {{1}, {0}, {kHuge}, {}, {-kHuge}, {}};
  EXPECT_EQ(combine_one(options, {0, 2, 4, 1}, rows, {}), 1.0f);
}

TEST(EpReferenceCombineTest, LanesOfARankAreAddedInTheirOrder) {
  // Lanes 0, 1, 2 use experts 2, 0, 1, whose rows are 2, 0, 1: huge, -huge, 1 in lane order.
  const RoutingOptions options = make_options(1, 1, 3, 3);
  EXPECT_EQ(combine_one(options, {2, 0, 1}, {{-kHuge, 1, kHuge}}, {.do_expand = true}), 1.0f);
}

TEST(EpReferenceCombineTest, EveryLaneOfADuplicateExpertCounts) {
  const RoutingOptions options = make_options(1, 2, 2, 3);
  EXPECT_EQ(combine_one(options, {1, 0, 1}, {{4}, {1, 2}}, {.do_expand = true}), 7.0f);
  EXPECT_EQ(combine_one(options, {1, 0, 1}, {{4}, {3}}, {}), 7.0f);
}

TEST(EpReferenceCombineTest, BiasesComeFirst) {
  const RoutingOptions options = make_options(1, 1, 1, 1);
  EXPECT_EQ(combine_one(options, {0}, {{1}}, {}, {kHuge, -kHuge}), 1.0f);
  EXPECT_EQ(combine_one(options, {0}, {{-kHuge}}, {}, {1, kHuge}), 0.0f);
  EXPECT_EQ(combine_one(options, {0}, {{1}}, {}, {2}), 3.0f);
}

TEST(EpReferenceCombineTest, BiasDoesNotEnterTheSumOfADomain) {
  // Domain 0: 1 + tiny -> 1; then tiny (the bias) + 1 -> 1. In one sum: 1 + 2 * tiny.
  const RoutingOptions options = make_options(2, 2, 4, 2);
  const std::vector<Floats> rows = {{1}, {kTiny}, {}, {}};
  EXPECT_EQ(combine_one(options, {0, 1}, rows, {}, {kTiny}), 1.0f);
  EXPECT_EQ(combine_one(options, {0, 1}, rows, {.allow_multiple_reduction = false}, {kTiny}),
            1 + 2 * kTiny);
}

TEST(EpReferenceCombineTest, ATokenWithoutExpertBecomesItsBiasOrZero) {
  const RoutingOptions options = make_options(1, 2, 2, 2);
  EXPECT_EQ(combine_one(options, {-1, -1}, {{}, {}}, {}), 0.0f);
  EXPECT_EQ(combine_one(options, {-1, -1}, {{}, {}}, {}, {1, kTiny}), 1.0f);
}

TEST(EpReferenceCombineTest, SumsStartFromPositiveZero) {
  const float sum = combine_one(make_options(1, 1, 1, 1), {0}, {{-0.0f}}, {.do_expand = true});
  EXPECT_EQ(bf16_from_float(sum), 0);
}

TEST(EpReferenceCombineTest, EveryRankGetsItsOwnTokensBack) {
  // The rows that two_ranks() describes, two columns wide.
  std::vector<CombineInput> inputs(2);
  inputs[0].x = bf16({1, 2, 3, 4});
  inputs[1].x = bf16({10, 20, 30, 40});
  const auto outputs = combine(two_ranks(), {.hidden = 2}, inputs);
  EXPECT_EQ(to_floats(outputs[0].x), (Floats{11, 22, 30, 40, 0, 0}));
  EXPECT_EQ(to_floats(outputs[1].x), (Floats{3, 4}));
  EXPECT_TRUE(outputs[0].topk_weights.empty());
}

TEST(EpReferenceCombineTest, WeightsComeFromTheRankOfEachLane) {
  std::vector<CombineInput> inputs(2);
  inputs[0].topk_weights = {1, 2, 3, 4};
  inputs[1].topk_weights = {5, 6, 7, 8};
  const auto compact = combine(two_ranks(), {.has_topk_weights = true}, inputs);
  EXPECT_EQ(compact[0].topk_weights, (Floats{1, 6, 7, 8, 0, 0}));
  EXPECT_EQ(compact[1].topk_weights, (Floats{3, 4}));

  const auto expanded = combine(two_ranks(), {.has_topk_weights = true, .do_expand = true}, inputs);
  EXPECT_EQ(expanded[0].topk_weights, (Floats{1, 7, 5, 6, 0, 0}));
  EXPECT_EQ(expanded[1].topk_weights, (Floats{3, 2}));
}

TEST(EpReferenceCombineTest, RefusesInputsOfOtherSizes) {
  EXPECT_THROW(combine(two_ranks(), {.hidden = 2}, std::vector<CombineInput>(2)), Error);
  EXPECT_THROW(combine(two_ranks(), {}, std::vector<CombineInput>(1)), Error);
  EXPECT_THROW(combine(two_ranks(), {.has_topk_weights = true}, std::vector<CombineInput>(2)),
               Error);
}

}  // namespace
}  // namespace deep_ep::reference
