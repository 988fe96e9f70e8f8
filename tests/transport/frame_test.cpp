#include "transport/frame.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>

#include "os/fd.hpp"
#include "os/socket.hpp"
#include "support/errors.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

class FrameTest : public ::testing::Test {
 protected:
  FrameTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
    sender_.reset(ends[0]);
    receiver_.reset(ends[1]);
  }

  UniqueFd sender_, receiver_;
  const Deadline deadline_{std::chrono::seconds(20)};
};

TEST_F(FrameTest, CarriesAPayload) {
  const Bytes payload(100, std::byte{7});
  send_frame(sender_.get(), payload, deadline_);
  send_frame(sender_.get(), {}, deadline_);
  EXPECT_EQ(recv_frame(receiver_.get(), 100, deadline_).payload, payload);
  EXPECT_TRUE(recv_frame(receiver_.get(), 0, deadline_).payload.empty());
}

TEST_F(FrameTest, CarriesAnErrorWhateverTheLimitOfThePayload) {
  send_error_frame(sender_.get(), Error(ErrorCode::kTimeout, std::string(100'000, 'x')), deadline_);
  const Frame frame = recv_frame(receiver_.get(), 0, deadline_);
  ASSERT_TRUE(frame.error);
  EXPECT_TRUE(is_error(*frame.error, ErrorCode::kTimeout, "xxx"));
}

TEST_F(FrameTest, RefusesMoreThanTheReaderTakes) {
  send_frame(sender_.get(), Bytes(101), deadline_);
  EXPECT_TRUE(is_error(error_from([&] { recv_frame(receiver_.get(), 100, deadline_); }),
                       ErrorCode::kInvalidArgument, "at most 100 bytes, got 101"));
}

TEST_F(FrameTest, RefusesAnotherProtocol) {
  const std::string other = "HTTP/1.1 400 Bad Request";
  send_bytes(sender_.get(), std::as_bytes(std::span(other)), deadline_);
  EXPECT_TRUE(is_error(error_from([&] { recv_frame(receiver_.get(), 100, deadline_); }),
                       ErrorCode::kInvalidArgument, "must be a rank of this library"));
}

}  // namespace
}  // namespace deep_ep
