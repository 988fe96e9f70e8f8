#include <gtest/gtest.h>

#include "deep_ep/bootstrap.hpp"
#include "support/errors.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(CallbackBootstrapTest, GathersThroughTheCallersFunction) {
  const auto bootstrap = make_callback_bootstrap(
      1, 2,
      [](std::span<const std::byte> own) {
        return std::vector<Bytes>{bytes({7}), Bytes(own.begin(), own.end())};
      },
      "host");
  EXPECT_EQ(bootstrap->rank_idx(), 1);
  EXPECT_EQ(bootstrap->num_ranks(), 2);
  EXPECT_EQ(bootstrap->host_id(), "host");
  EXPECT_EQ(bootstrap->all_gather(bytes({1, 2})), (std::vector<Bytes>{bytes({7}), bytes({1, 2})}));
}

TEST(CallbackBootstrapTest, RefusesARankOutsideTheGroupAndNoFunction) {
  const auto gather = [](std::span<const std::byte>) { return std::vector<Bytes>{}; };
  for (const int rank : {-1, 2}) {
    EXPECT_TRUE(is_error(error_from([&] { make_callback_bootstrap(rank, 2, gather); }),
                         ErrorCode::kInvalidArgument, "rank must be in [0, 2)"));
  }
  EXPECT_EQ(error_from([&] { make_callback_bootstrap(0, 0, gather); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_from([&] { make_callback_bootstrap(0, 1, nullptr); }).code(),
            ErrorCode::kInvalidArgument);
}

TEST(CallbackBootstrapTest, RefusesAWrongNumberOfMessages) {
  const auto bootstrap = make_callback_bootstrap(
      0, 2, [](std::span<const std::byte>) { return std::vector<Bytes>{{}}; });
  EXPECT_TRUE(is_error(error_from([&] { bootstrap->all_gather({}); }), ErrorCode::kInvalidArgument,
                       "got 1 for 2 ranks"));
}

TEST(CallbackBootstrapTest, RefusesMessagesInAnotherOrder) {
  const auto bootstrap = make_callback_bootstrap(0, 2, [](std::span<const std::byte> own) {
    return std::vector<Bytes>{bytes({7}), Bytes(own.begin(), own.end())};
  });
  EXPECT_TRUE(is_error(error_from([&] { bootstrap->all_gather(bytes({1})); }),
                       ErrorCode::kInvalidArgument, "rank order"));
}

}  // namespace
}  // namespace deep_ep
