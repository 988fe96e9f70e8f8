#include "transport/hello.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

constexpr Id128 kToken{1, 2, 3};
constexpr Hello kHello{.rank_idx = 2, .num_ranks = 4, .token = kToken};

TEST(HelloTest, ReadsWhatWasWritten) {
  const Bytes bytes = encode_hello(kHello);
  EXPECT_EQ(bytes.size(), kHelloBytes);
  EXPECT_EQ(parse_hello(bytes, 4, kToken), kHello);
}

TEST(HelloTest, StartsWithTheNameOfTheLibrary) {
  const Bytes bytes = encode_hello(kHello);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 8), "deep_ep\n");
}

TEST(HelloTest, RefusesWhatIsNoHello) {
  const Bytes rubbish(kHelloBytes, std::byte{'x'});
  EXPECT_TRUE(
      is_error(error_from([&] { parse_hello(rubbish, 4, kToken); }), ErrorCode::kPeer, "no hello"));
}

TEST(HelloTest, RefusesEveryOtherLength) {
  Bytes bytes = encode_hello(kHello);
  bytes.push_back({});
  EXPECT_EQ(error_from([&] { parse_hello(bytes, 4, kToken); }).code(), ErrorCode::kPeer);
  for (std::size_t size = 0; size < kHelloBytes; ++size) {
    bytes.resize(size);
    EXPECT_EQ(error_from([&] { parse_hello(bytes, 4, kToken); }).code(), ErrorCode::kPeer) << size;
    bytes = encode_hello(kHello);
  }
}

TEST(HelloTest, RefusesAnotherVersionGroupOrRankWithBothValues) {
  Bytes other_version = encode_hello(kHello);
  other_version[8] = std::byte{9};
  EXPECT_TRUE(is_error(error_from([&] { parse_hello(other_version, 4, kToken); }),
                       ErrorCode::kInvalidArgument, "protocol 1, the other 9"));
  EXPECT_TRUE(is_error(error_from([&] { parse_hello(encode_hello(kHello), 8, kToken); }),
                       ErrorCode::kInvalidArgument, "got 4 in a group of 8"));
  const Hello outside{.rank_idx = 4, .num_ranks = 4, .token = kToken};
  EXPECT_TRUE(is_error(error_from([&] { parse_hello(encode_hello(outside), 4, kToken); }),
                       ErrorCode::kInvalidArgument, "rank must be in [0, 4), got 4"));
  EXPECT_TRUE(is_error(error_from([&] { parse_hello(encode_hello(kHello), 4, Id128{}); }),
                       ErrorCode::kInvalidArgument, "another group"));
}

}  // namespace
}  // namespace deep_ep
