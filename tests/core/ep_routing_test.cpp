#include "core/ep_routing.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace deep_ep {
namespace {

// Two ranks of two experts; rank 0 has two tokens, rank 1 one.
struct EpRoutingTest : testing::Test {
  RoutingShape shape{
      .topology = {.rank_idx = 0, .num_ranks = 2, .num_scaleout_ranks = 1, .num_scaleup_ranks = 2},
      .num_experts = 4,
      .num_topk = 3,
      .expert_alignment = 4,
      .do_expand = true};
  std::vector<std::int64_t> ids0 = {2, 0, 3, 2, 2, -1};  // token 1 selects expert 2 twice
  std::vector<std::int64_t> ids1 = {3, -1, 1};

  TopkIds ids(std::vector<std::int64_t>& values) const {
    return TopkIds(TensorView::matrix(values.data(), DType::kInt64,
                                      static_cast<std::int64_t>(values.size()) / 3, 3));
  }
  CountMatrix counts() {
    CountMatrix matrix(shape);
    count_selections(shape, ids(ids0), 2, matrix.values_of(0));
    count_selections(shape, ids(ids1), 1, matrix.values_of(1));
    return matrix;
  }
};

TEST_F(EpRoutingTest, CountsTokensOnceARankAndSelectionsOnceALane) {
  const CountMatrix matrix = counts();
  EXPECT_EQ(matrix.row(0).tokens_to_rank(0), 1);
  EXPECT_EQ(matrix.row(0).tokens_to_rank(1), 2);
  EXPECT_EQ(matrix.row(0).tokens_to_node(0), 2);
  const std::vector<std::int32_t> expected = {1, 0, 3, 1};
  for (std::size_t e = 0; e < 4; ++e) EXPECT_EQ(matrix.row(0).selections()[e], expected[e]) << e;
}

TEST_F(EpRoutingTest, ExpertsStartAtMultiplesOfTheAlignment) {
  const ReceiveCounts received = receive_counts(counts(), 1);
  EXPECT_EQ(received.num_tokens, 3);
  EXPECT_EQ(received.expert_counts, (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(received.expert_starts, (std::vector<std::int64_t>{0, 4}));
  EXPECT_EQ(received.num_aligned_rows, 8);
}

TEST_F(EpRoutingTest, PlacesByExpertSourceTokenAndLane) {
  const Routing first = place_tokens(counts(), 0, ids(ids0), 2, 0, 2);
  const std::vector<int> rows = {0, 0, 4, 1, 2, -1};
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(first.lanes[i].row, rows[i]) << i;
  const Routing second = place_tokens(counts(), 1, ids(ids1), 1, 0, 2);
  EXPECT_EQ(second.lanes[0].row, 5) << "after the row of rank 0";
  EXPECT_EQ(second.lanes[0].token_row, 2);
  EXPECT_EQ(second.lanes[2].rank, 0);
}

TEST_F(EpRoutingTest, TheHighestLaneOfARankIsTheMaster) {
  const Routing routing = place_tokens(counts(), 0, ids(ids0), 2, 0, 2);
  const std::vector<bool> masters = {false, true, true, false, true, false};
  for (std::size_t i = 0; i < masters.size(); ++i)
    EXPECT_EQ(routing.lanes[i].is_master, masters[i]) << i;
}

TEST_F(EpRoutingTest, LooksOnlyAtTheAskedRanks) {
  const Routing routing = place_tokens(counts(), 0, ids(ids0), 2, 1, 2);
  EXPECT_EQ(routing.lanes[1].rank, -1);
  EXPECT_EQ(routing.lanes[0].row, 0);
}

}  // namespace
}  // namespace deep_ep
