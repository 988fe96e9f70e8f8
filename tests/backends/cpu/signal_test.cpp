#include "backends/cpu/signal.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace deep_ep::cpu {
namespace {

using std::chrono::milliseconds;

const auto kNever = [] { return false; };

// Eager, yielding, and one that goes to sleep at once.
const WaitPolicy kPolicies[] = {
    {}, {.num_spins = 0}, {.num_spins = 0, .yield_for = milliseconds(0)}};

TEST(SignalTest, CarriesWhatWasWrittenBeforeRoundAfterRound) {
  for (const WaitPolicy& policy : kPolicies) {
    Signal there, back;
    std::uint64_t payload = 0;
    constexpr std::uint64_t kNumRounds = 5000;
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    std::thread other([&] {
      for (std::uint64_t round = 1; round <= kNumRounds; ++round) {
        ASSERT_TRUE(wait_at_least(there, round, policy, deadline, kNever));
        ASSERT_EQ(payload, round);
        post(back, round);
      }
    });
    for (std::uint64_t round = 1; round <= kNumRounds; ++round) {
      payload = round;
      post(there, round);
      ASSERT_TRUE(wait_at_least(back, round, policy, deadline, kNever));
    }
    other.join();
  }
}

TEST(SignalTest, EndsAtTheDeadline) {
  Signal signal;
  EXPECT_FALSE(wait_at_least(signal, 1, {}, Clock::now() + milliseconds(30), kNever));
}

TEST(SignalTest, EndsWhenToldToStop) {
  Signal signal;
  std::atomic<bool> stop = false;
  std::thread other([&] { stop = true; });
  EXPECT_FALSE(wait_at_least(signal, 1, {}, Clock::now() + std::chrono::seconds(60),
                             [&] { return stop.load(); }));
  other.join();
}

TEST(SignalTest, ASignalThatCameCountsEvenIfToldToStop) {
  Signal signal;
  EXPECT_TRUE(wait_at_least(signal, 1, {.num_spins = 0, .yield_for = milliseconds(0)},
                            Clock::now() + std::chrono::seconds(60), [&] {
                              post(signal, 1);
                              return true;
                            }));
}

}  // namespace
}  // namespace deep_ep::cpu
