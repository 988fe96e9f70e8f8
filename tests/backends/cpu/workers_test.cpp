#include "backends/cpu/workers.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace deep_ep::cpu {
namespace {

TEST(WorkersTest, EveryPieceIsWorkedOnOnce) {
  for (const int num_threads : {1, 2, 5}) {
    Workers workers(num_threads);
    for (int round = 0; round < 300; ++round) {
      std::vector<std::atomic<int>> seen(101);
      workers.parallel_for(101, 7, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      });
      for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST(WorkersTest, NoWorkCallsNothing) {
  Workers workers(2);
  workers.parallel_for(0, 16, [](std::int64_t, std::int64_t) { FAIL(); });
}

}  // namespace
}  // namespace deep_ep::cpu
