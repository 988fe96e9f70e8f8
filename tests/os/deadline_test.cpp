#include "os/deadline.hpp"

#include <gtest/gtest.h>

namespace deep_ep {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;

TEST(DeadlineTest, HasPassedAtOnceWithoutTime) {
  EXPECT_TRUE(Deadline(seconds(0)).has_passed());
  EXPECT_TRUE(Deadline(seconds(-1)).has_passed());
  EXPECT_EQ(Deadline(seconds(-1)).remaining_poll_ms(), 0);
}

TEST(DeadlineTest, TakesEveryTimeoutWithoutOverflow) {
  const Deadline never(nanoseconds::max());
  EXPECT_FALSE(never.has_passed());
  EXPECT_GT(never.remaining_poll_ms(), 0);
  EXPECT_FALSE(never.later_by(nanoseconds::max()).has_passed());
  EXPECT_LE(never.at_most(seconds(1)).remaining(), seconds(1));
}

TEST(DeadlineTest, TellsItsLimit) {
  EXPECT_EQ(Deadline(std::chrono::milliseconds(2500)).limit_text(), "2.5 s");
}

}  // namespace
}  // namespace deep_ep
