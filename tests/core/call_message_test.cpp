#include "core/call_message.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

struct CallMessageTest : ::testing::Test {
  RoutingShape shape{
      .topology = {.rank_idx = 0, .num_ranks = 2, .num_scaleout_ranks = 1, .num_scaleup_ranks = 2},
      .num_experts = 4,
      .num_topk = 2};
  CallHeader header = [this] {
    CallHeader h;
    h.call = 7;
    h.terms.operation = static_cast<std::int64_t>(Operation::kDispatch);
    h.terms.num_max_tokens_per_rank = 8;
    h.num_tokens = 3;
    h.num_counts = shape.num_counts();
    return h;
  }();
  std::vector<std::int32_t> counts = {2, 3, 3, 2, 1, 0, 4};  // ranks, domain, experts
  std::vector<std::byte> bytes =
      std::vector<std::byte>(static_cast<std::size_t>(max_message_bytes(2)));

  bool reads_counts() {
    write_message(bytes, header, counts);
    std::vector<std::int32_t> row(counts.size());
    try {
      read_counts(bytes, read_header(bytes, 7, 1), shape, 1, row);
      return row == counts;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPeer);
      return false;
    }
  }
};

TEST_F(CallMessageTest, ReadsWhatWasWritten) { EXPECT_TRUE(reads_counts()); }

TEST_F(CallMessageTest, RefusesCountsThatNoTokensHave) {
  const std::vector<std::vector<std::int32_t>> impossible = {
      {4, 3, 4, 2, 2, 0, 4},   // more tokens to a rank than there are
      {-1, 3, 3, 2, 1, 0, 4},  // negative
      {2, 3, 1, 2, 1, 0, 4},   // fewer to the domain than to its rank
      {2, 3, 3, 1, 0, 0, 4},   // fewer selections than tokens
      {2, 3, 3, 2, 3, 0, 4},   // more selections than lanes
  };
  for (const auto& row : impossible) {
    counts = row;
    EXPECT_FALSE(reads_counts());
  }
}

TEST_F(CallMessageTest, RefusesAMessageOfAnotherCall) {
  write_message(bytes, header, counts);
  EXPECT_THROW(read_header(bytes, 8, 1), Error);
}

TEST_F(CallMessageTest, SaysWhoDiffersInWhat) {
  CallHeader other = header;
  other.terms.num_max_tokens_per_rank = 16;
  const auto problem = find_problem(std::vector<CallHeader>{header, other});
  ASSERT_TRUE(problem);
  EXPECT_FALSE(problem->is_refusal);
  EXPECT_EQ(problem->text,
            "num_max_tokens_per_rank must be equal on all ranks, got 8 on rank 0, 16 on rank 1");
}

TEST_F(CallMessageTest, AnotherOperationIsTheOnlyDifferenceNamed) {
  CallHeader other = header;
  other.terms.operation = static_cast<std::int64_t>(Operation::kCombine);
  other.terms.row_bytes = 99;
  const auto problem = find_problem(std::vector<CallHeader>{header, other});
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->text,
            "operation must be equal on all ranks, got dispatch on rank 0, combine on rank 1");
}

}  // namespace
}  // namespace deep_ep
