#include "base/unique.hpp"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace deep_ep {
namespace {

std::vector<int> closed;

struct RecordingTraits {
  using Handle = int;
  static constexpr int kNull = -1;
  static void close(int handle) noexcept { closed.push_back(handle); }
};
using Recorded = Unique<RecordingTraits>;

class UniqueTest : public ::testing::Test {
 protected:
  void SetUp() override { closed.clear(); }
};

TEST_F(UniqueTest, ClosesOnceAtTheEndOfItsLife) {
  { const Recorded owner(7); }
  EXPECT_EQ(closed, std::vector<int>{7});
}

TEST_F(UniqueTest, OwnsNothingByDefault) {
  {
    const Recorded owner;
    EXPECT_FALSE(owner);
  }
  EXPECT_TRUE(closed.empty());
}

TEST_F(UniqueTest, MovesOwnership) {
  {
    Recorded first(1);
    Recorded second(std::move(first));
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): that it is empty is the point
    EXPECT_EQ(second.get(), 1);
    Recorded third(3);
    third = std::move(second);
    EXPECT_EQ(closed, std::vector<int>{3});
  }
  EXPECT_EQ(closed, (std::vector<int>{3, 1}));
}

TEST_F(UniqueTest, ReleaseGivesTheHandleUp) {
  {
    Recorded owner(5);
    EXPECT_EQ(owner.release(), 5);
  }
  EXPECT_TRUE(closed.empty());
}

}  // namespace
}  // namespace deep_ep
