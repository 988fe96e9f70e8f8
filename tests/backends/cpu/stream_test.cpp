#include "backends/cpu/stream.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace deep_ep::cpu {
namespace {

TEST(StreamTest, RunsWhatWasQueuedBeforeWhatIsRun) {
  Stream stream;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    stream.enqueue([&order, i] { order.push_back(2 * i); });
    stream.run([&order, i] { order.push_back(2 * i + 1); });
  }
  ASSERT_EQ(order.size(), 200U);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(StreamTest, AThrowEndsTheTurnAndReachesTheCaller) {
  Stream stream;
  EXPECT_THROW(stream.run([] { throw std::runtime_error("no"); }), std::runtime_error);
  bool has_run = false;
  stream.run([&] { has_run = true; });
  EXPECT_TRUE(has_run);
}

TEST(StreamTest, ItsEndWaitsForWhatIsQueued) {
  int num_done = 0;
  {
    Stream stream;
    for (int i = 0; i < 50; ++i) stream.enqueue([&] { ++num_done; });
  }
  EXPECT_EQ(num_done, 50);
}

TEST(StreamTest, ThreadsTakeTurns) {
  Stream stream;
  int value = 0;  // no lock: the stream is one
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        if (i % 2 == 0) {
          stream.run([&] { ++value; });
        } else {
          stream.enqueue([&] { ++value; });
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  stream.run([&] { EXPECT_EQ(value, 2000); });
}

}  // namespace
}  // namespace deep_ep::cpu
