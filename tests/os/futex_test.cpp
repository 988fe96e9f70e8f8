#include "os/futex.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "os/shared_memory.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep {
namespace {

constexpr std::int64_t kNsPerSec = 1'000'000'000;

/// Waits as a caller does: the result of futex_wait may be early, the word decides.
void wait_until_set(std::uint32_t& word) {
  while (std::atomic_ref(word).load(std::memory_order_acquire) == 0) {
    ASSERT_NE(futex_wait(&word, 0, 20 * kNsPerSec), FutexResult::kTimeout);
  }
}

void set_and_wake(std::uint32_t& word) {
  std::atomic_ref(word).store(1, std::memory_order_release);
  futex_wake_all(&word);
}

TEST(FutexTest, ReturnsAtOnceIfTheWordHasChanged) {
  const std::uint32_t word = 1;
  EXPECT_EQ(futex_wait(&word, 0, kNsPerSec), FutexResult::kChanged);
}

TEST(FutexTest, GivesUpAfterItsTimeout) {
  const std::uint32_t word = 0;
  EXPECT_EQ(futex_wait(&word, 0, 1000), FutexResult::kTimeout);
  EXPECT_EQ(futex_wait(&word, 0, -1), FutexResult::kTimeout);
}

TEST(FutexTest, WakesAThread) {
  std::uint32_t word = 0;
  std::jthread waiter([&] { wait_until_set(word); });
  set_and_wake(word);
}

TEST(FutexTest, WakesAnotherProcess) {
  const UniqueFd fd = create_shared_memory("test", 4096);
  const Mapping mapping(fd.get(), 4096);
  auto& word = *reinterpret_cast<std::uint32_t*>(mapping.data());
  // another mapping of the same page: a private futex would not find the waiter
  testing::ForkedProcess child([&] {
    const Mapping own(fd.get(), 4096);
    wait_until_set(*reinterpret_cast<std::uint32_t*>(own.data()));
  });
  ::usleep(50'000);  // so that the child sleeps, most likely; it must end in any case
  set_and_wake(word);
  EXPECT_EQ(child.wait(), 0);
}

TEST(FutexTest, NamesTheCallWhenTheAddressIsBad) {
  EXPECT_TRUE(testing::is_error(testing::error_from([] { futex_wait(nullptr, 0, 1); }),
                                ErrorCode::kSystem, "FUTEX_WAIT"));
  EXPECT_TRUE(testing::is_error(testing::error_from([] { futex_wake_all(nullptr); }),
                                ErrorCode::kSystem, "FUTEX_WAKE"));
}

}  // namespace
}  // namespace deep_ep
