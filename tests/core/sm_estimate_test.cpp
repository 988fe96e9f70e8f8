#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "deep_ep/ep_buffer.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

Topology grid(int num_scaleout_ranks, int num_scaleup_ranks) {
  return {.num_ranks = num_scaleout_ranks * num_scaleup_ranks,
          .num_scaleout_ranks = num_scaleout_ranks,
          .num_scaleup_ranks = num_scaleup_ranks};
}

SmEstimateArgs in_grid(int num_scaleout_ranks, int num_scaleup_ranks, int num_experts,
                       int num_topk) {
  const Topology topology = grid(num_scaleout_ranks, num_scaleup_ranks);
  return {
      .physical = topology, .logical = topology, .num_experts = num_experts, .num_topk = num_topk};
}

// Expected: ceil(1.3 * n) with n from exact binomials, rounded up to a multiple of 4.
TEST(SmEstimateTest, OneDomainIsBoundByNvlink) {
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 8, 256, 8)), 16);  // n = 9.62
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 2, 8, 2)), 24);    // n = 17.98
  SmEstimateArgs faster = in_grid(1, 8, 256, 8);
  faster.nvlink_gbs = 720;
  EXPECT_EQ(theoretical_num_sms(faster), 28);  // n = 19.45
}

TEST(SmEstimateTest, SeveralDomainsAreBoundByTheSlowerLink) {
  EXPECT_EQ(theoretical_num_sms(in_grid(2, 8, 256, 8)), 12);  // n = 8.73, RDMA
  EXPECT_EQ(theoretical_num_sms(in_grid(8, 1, 64, 4)), 4);    // n = 1.62, there is no NVLink
  SmEstimateArgs fast_rdma = in_grid(2, 4, 64, 4);
  fast_rdma.rdma_gbs = 400;
  EXPECT_EQ(theoretical_num_sms(fast_rdma), 24);  // n = 16.93, NVLink
}

TEST(SmEstimateTest, DirectTransfersBetweenDomainsAreSizedByNvlinkWhereThereIsAny) {
  SmEstimateArgs args = in_grid(2, 8, 256, 8);
  args.logical = grid(1, 16);
  EXPECT_EQ(theoretical_num_sms(args), 16);  // n = 11.81
  args.physical = grid(16, 1);
  EXPECT_EQ(theoretical_num_sms(args), 4);
}

TEST(SmEstimateTest, ManyExpertsDoNotOverflow) {
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 8, 2048, 32)), 12);   // n = 9.06
  EXPECT_EQ(theoretical_num_sms(in_grid(4, 64, 2048, 32)), 16);  // n = 9.23
}

TEST(SmEstimateTest, WithoutTrafficTheMinimumIsEnough) {
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 1, 8, 2)), 4);
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 1, 8, 8)), 4);
}

TEST(SmEstimateTest, WithoutOverlapAtLeast64AreUsed) {
  SmEstimateArgs args = in_grid(1, 8, 256, 8);
  args.prefer_overlap_with_compute = false;
  EXPECT_EQ(theoretical_num_sms(args), 64);
  args.num_device_sms = 33;
  EXPECT_EQ(theoretical_num_sms(args), 32);
}

TEST(SmEstimateTest, TheDeviceLimitIsRoundedDownToEvenAndNeverBelowTwo) {
  SmEstimateArgs args = in_grid(1, 8, 256, 8);
  for (const auto& [num_device_sms, expected] :
       {std::pair{132, 16}, {15, 14}, {3, 2}, {2, 2}, {1, 2}, {0, 16}}) {
    args.num_device_sms = num_device_sms;
    EXPECT_EQ(theoretical_num_sms(args), expected) << num_device_sms;
  }
}

TEST(SmEstimateTest, AbsurdRatesStillGiveAnEvenNumber) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double gbs : {1e-300, 1e300, infinity, -1.0, infinity - infinity}) {
    for (int field = 0; field < 4; ++field) {
      SmEstimateArgs args = in_grid(2, 4, 64, 4);
      (field == 0   ? args.rdma_gbs
       : field == 1 ? args.nvlink_gbs
       : field == 2 ? args.sm_read_gbs
                    : args.sm_write_gbs) = gbs;
      const int num_sms = theoretical_num_sms(args);
      EXPECT_GE(num_sms, 4) << gbs << " in field " << field;
      EXPECT_EQ(num_sms % 4, 0) << gbs << " in field " << field;
    }
  }
}

TEST(SmEstimateTest, MoreLanesThanExpertsReachEveryRank) {
  EXPECT_EQ(theoretical_num_sms(in_grid(1, 4, 4, 32)), theoretical_num_sms(in_grid(1, 4, 4, 4)));
}

TEST(SmEstimateTest, RefusesWhatCannotBeRouted) {
  EXPECT_THROW(theoretical_num_sms(in_grid(1, 8, 12, 2)), Error);
  EXPECT_THROW(theoretical_num_sms(in_grid(1, 8, 0, 2)), Error);
  EXPECT_THROW(theoretical_num_sms(in_grid(1, 8, 8, 0)), Error);
  SmEstimateArgs args = in_grid(1, 8, 8, 2);
  args.physical.num_scaleup_ranks = 0;
  EXPECT_THROW(theoretical_num_sms(args), Error);
}

TEST(QpEstimateTest, DirectTransfersUseAtMostNineAndHybridOnes16ASm) {
  EXPECT_EQ(theoretical_num_qps(4, false, 17), 4);
  EXPECT_EQ(theoretical_num_qps(24, false, 17), 9);
  EXPECT_EQ(theoretical_num_qps(4, true, 129), 65);
  EXPECT_EQ(theoretical_num_qps(0, true, 129), 1);
}

TEST(QpEstimateTest, TheAllocatedQueuePairsAreTheLimit) {
  EXPECT_EQ(theoretical_num_qps(24, true, 65), 65);
  EXPECT_EQ(theoretical_num_qps(24, false, 3), 3);
  EXPECT_EQ(theoretical_num_qps(std::numeric_limits<int>::max(), true, 1024), 1024);
  EXPECT_EQ(theoretical_num_qps(24, true, 0), 129) << "0 is automatic";
  EXPECT_EQ(theoretical_num_qps(24, false, 0), 9) << "0 is automatic";
  EXPECT_THROW(theoretical_num_qps(-1, true, 129), Error);
}

}  // namespace
}  // namespace deep_ep
