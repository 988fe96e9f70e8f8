#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "deep_ep/bootstrap.hpp"
#include "support/errors.hpp"
#include "support/threads.hpp"

namespace deep_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_from;
using testing::is_error;
using testing::run_threads;

/// Differs in length and content between ranks and rounds.
Bytes round_message(int rank, int round) {
  return Bytes(static_cast<std::size_t>((rank + round) % 5),
               static_cast<std::byte>((rank * 31 + round) % 256));
}

TEST(ThreadBootstrapTest, GathersRoundAfterRound) {
  constexpr int kNumRanks = 8;
  const auto ends = make_thread_bootstraps(kNumRanks, seconds(100));
  std::atomic<int> num_wrong = 0;
  run_threads(kNumRanks, [&](int rank) {
    for (int round = 0; round < 1000; ++round) {
      const auto messages =
          ends[static_cast<std::size_t>(rank)]->all_gather(round_message(rank, round));
      for (int other = 0; other < kNumRanks; ++other) {
        if (messages[static_cast<std::size_t>(other)] != round_message(other, round)) ++num_wrong;
      }
    }
  });
  EXPECT_EQ(num_wrong, 0);
}

TEST(ThreadBootstrapTest, OneRankIsAGroup) {
  const auto ends = make_thread_bootstraps(1);
  EXPECT_EQ(ends[0]->all_gather(round_message(3, 1)), std::vector<Bytes>{round_message(3, 1)});
}

TEST(ThreadBootstrapTest, GivesEachRankItsHost) {
  const auto ends = make_thread_bootstraps(2, seconds(1), {"a", "b"});
  EXPECT_EQ(ends[0]->host_id(), "a");
  EXPECT_EQ(ends[1]->host_id(), "b");
  EXPECT_EQ(ends[1]->rank_idx(), 1);
  EXPECT_EQ(ends[1]->num_ranks(), 2);
  EXPECT_EQ(make_thread_bootstraps(1)[0]->host_id(), default_host_id());
}

TEST(ThreadBootstrapTest, ATimeoutNamesTheMissingRanksAndReachesAllOthers) {
  const auto ends = make_thread_bootstraps(4, milliseconds(100));
  run_threads(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    EXPECT_TRUE(is_error(error_from([&] { ends[static_cast<std::size_t>(rank)]->all_gather({}); }),
                         ErrorCode::kTimeout,
                         "ranks 1 and 3 did not come to all_gather within 0.1 s"));
  });
  EXPECT_TRUE(
      is_error(error_from([&] { ends[1]->all_gather({}); }), ErrorCode::kTimeout, "ranks 1 and 3"));
}

TEST(ThreadBootstrapTest, ARankThatLeavesFailsThoseThatWaitForIt) {
  auto ends = make_thread_bootstraps(2, seconds(100));
  run_threads(2, [&](int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(20));
      ends[1].reset();
    } else {
      EXPECT_TRUE(is_error(error_from([&] { ends[0]->all_gather({}); }), ErrorCode::kPeer,
                           "rank 1 left the group"));
    }
  });
}

TEST(ThreadBootstrapTest, LeavingAfterTheLastRoundHarmsNobody) {
  for (int i = 0; i < 200; ++i) {
    auto ends = make_thread_bootstraps(3, seconds(100));
    run_threads(3, [&](int rank) {
      std::shared_ptr<Bootstrap>& end = ends[static_cast<std::size_t>(rank)];
      EXPECT_EQ(end->all_gather({}).size(), 3U);
      end.reset();
    });
  }
}

TEST(ThreadBootstrapTest, RefusesTwoThreadsAtOneEnd) {
  const auto ends = make_thread_bootstraps(2, milliseconds(500));
  std::atomic<int> num_refused = 0;
  run_threads(2, [&](int) {
    if (error_from([&] { ends[0]->all_gather({}); }).code() == ErrorCode::kInvalidArgument) {
      ++num_refused;
    }
  });
  EXPECT_EQ(num_refused, 1);
}

TEST(ThreadBootstrapTest, RefusesBadArguments) {
  EXPECT_EQ(error_from([] { make_thread_bootstraps(0); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_from([] { make_thread_bootstraps(2, seconds(1), {"a"}); }).code(),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace deep_ep
