#include "deep_ep/topology.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

using Hosts = std::vector<std::string>;

/// The message of the Error with `code` that the call throws; fails the test if it throws none.
std::string refusal(ErrorCode code, int rank_idx, const Hosts& host_ids) {
  try {
    topology_from_host_ids(rank_idx, host_ids);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return {};
}

TEST(TopologyTest, RanksOfOneHostFormOneDomain) {
  const Topology topology = topology_from_host_ids(1, {"a", "a", "a"});
  EXPECT_EQ(topology.rank_idx, 1);
  EXPECT_EQ(topology.num_ranks, 3);
  EXPECT_EQ(topology.num_scaleout_ranks, 1);
  EXPECT_EQ(topology.num_scaleup_ranks, 3);
  EXPECT_FALSE(topology.is_hybrid());
}

TEST(TopologyTest, EachHostIsADomain) {
  const Topology topology = topology_from_host_ids(3, {"b", "b", "a", "a", "c", "c"});
  EXPECT_EQ(topology.num_scaleout_ranks, 3);
  EXPECT_EQ(topology.num_scaleup_ranks, 2);
  EXPECT_EQ(topology.scaleout_rank_idx(), 1);
  EXPECT_EQ(topology.scaleup_rank_idx(), 1);
  EXPECT_EQ(topology.rank_at(2, 1), 5);
  EXPECT_TRUE(topology.is_hybrid());
}

TEST(TopologyTest, HostsMayHaveOneRankEach) {
  const Topology topology = topology_from_host_ids(0, {"a", "b"});
  EXPECT_EQ(topology.num_scaleout_ranks, 2);
  EXPECT_EQ(topology.num_scaleup_ranks, 1);
}

TEST(TopologyTest, RefusesHostsWhoseRanksAreNotNeighbours) {
  EXPECT_EQ(refusal(ErrorCode::kUnsupported, 0, {"a", "b", "a", "b"}),
            "the ranks of a host must be neighbours, but rank 2 is apart from other ranks of its "
            "host a");
}

TEST(TopologyTest, RefusesHostsOfDifferentSize) {
  EXPECT_EQ(refusal(ErrorCode::kUnsupported, 0, {"a", "a", "b"}),
            "all hosts must have equally many ranks, but host b has ranks 2..2 and host a has 2 "
            "ranks");
  refusal(ErrorCode::kUnsupported, 0, {"a", "b", "b"});
}

TEST(TopologyTest, RefusesRanksOutsideTheGroup) {
  refusal(ErrorCode::kInvalidArgument, 2, {"a", "a"});
  refusal(ErrorCode::kInvalidArgument, -1, {"a", "a"});
  refusal(ErrorCode::kInvalidArgument, 0, {});
}

TEST(TopologyTest, WithoutHybridModeAllRanksFormOneDomain) {
  const Topology physical = topology_from_host_ids(2, {"a", "a", "b", "b"});
  const Topology direct = logical_topology(physical, false);
  EXPECT_EQ(direct.rank_idx, 2);
  EXPECT_EQ(direct.num_ranks, 4);
  EXPECT_EQ(direct.num_scaleout_ranks, 1);
  EXPECT_EQ(direct.num_scaleup_ranks, 4);

  const Topology hybrid = logical_topology(physical, true);
  EXPECT_EQ(hybrid.num_scaleout_ranks, 2);
  EXPECT_EQ(hybrid.num_scaleup_ranks, 2);
}

}  // namespace
}  // namespace deep_ep
