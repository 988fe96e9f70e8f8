#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "os/deadline.hpp"
#include "os/socket.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"
#include "support/free_port.hpp"
#include "support/threads.hpp"
#include "transport/frame.hpp"
#include "transport/hello.hpp"
#include "transport/tcp_meeting.hpp"

namespace deep_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::connect_local;
using testing::error_from;
using testing::ForkedProcess;
using testing::free_port;
using testing::is_error;
using testing::run_threads;

constexpr seconds kPatience{60};

Bytes message_of(int rank, int round) {
  return Bytes(static_cast<std::size_t>((rank + round) % 5 * 1000),
               static_cast<std::byte>((rank * 31 + round) % 256));
}

/// One rank's part of a group that gathers `num_rounds` times.
void gather_rounds(int rank, int num_ranks, const std::string& address, int port, int num_rounds) {
  const auto bootstrap = make_tcp_bootstrap(rank, num_ranks, address, port, kPatience);
  for (int round = 0; round < num_rounds; ++round) {
    const std::vector<Bytes> messages = bootstrap->all_gather(message_of(rank, round));
    ASSERT_EQ(messages.size(), static_cast<std::size_t>(num_ranks));
    for (int other = 0; other < num_ranks; ++other) {
      ASSERT_EQ(messages[static_cast<std::size_t>(other)], message_of(other, round))
          << "rank " << rank << ", message of " << other << ", round " << round;
    }
  }
}

class TcpBootstrapAddressTest : public ::testing::TestWithParam<const char*> {};

TEST_P(TcpBootstrapAddressTest, GathersRoundAfterRound) {
  const int port = free_port();
  run_threads(4, [&](int rank) { gather_rounds(rank, 4, GetParam(), port, 50); });
}

INSTANTIATE_TEST_SUITE_P(Ipv4, TcpBootstrapAddressTest, ::testing::Values("127.0.0.1"));
INSTANTIATE_TEST_SUITE_P(Ipv6, TcpBootstrapAddressTest, ::testing::Values("::1", "[::1]"));
INSTANTIATE_TEST_SUITE_P(Name, TcpBootstrapAddressTest, ::testing::Values("localhost"));

TEST(TcpBootstrapTest, GathersBetweenProcesses) {
  const int port = free_port();
  std::vector<ForkedProcess> children;
  for (int rank = 1; rank < 4; ++rank) {
    children.emplace_back([=] { gather_rounds(rank, 4, "127.0.0.1", port, 20); });
  }
  gather_rounds(0, 4, "127.0.0.1", port, 20);
  for (ForkedProcess& child : children) EXPECT_EQ(child.wait(), 0);
}

TEST(TcpBootstrapTest, OneRankNeedsNoNetwork) { gather_rounds(0, 1, "nowhere.invalid", 1, 2); }

TEST(TcpBootstrapTest, WaitsForARankZeroThatStartsLater) {
  const int port = free_port();
  run_threads(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(300));
    gather_rounds(rank, 2, "127.0.0.1", port, 2);
  });
}

TEST(TcpBootstrapTest, StrangersAndMisfitsAreRefusedAndStopNobody) {
  const int port = free_port();
  run_threads(6, [&](int part) {
    if (part < 2) {  // rank 1 comes last, so that all others meet a waiting rank 0
      if (part == 1) std::this_thread::sleep_for(milliseconds(500));
      gather_rounds(part, 2, "127.0.0.1", port, 2);
      return;
    }
    const UniqueFd silent_or_rubbish = connect_local(port);
    if (part == 2) std::this_thread::sleep_for(seconds(1));  // says nothing
    if (part == 3) {
      const std::string rubbish(100'000, 'G');
      ASSERT_GT(::send(silent_or_rubbish.get(), rubbish.data(), rubbish.size(), MSG_NOSIGNAL), 0);
    }
    if (part == 4) {
      EXPECT_TRUE(
          is_error(error_from([&] { make_tcp_bootstrap(1, 3, "127.0.0.1", port, kPatience); }),
                   ErrorCode::kInvalidArgument, "got 3 in a group of 2"));
    }
    if (part == 5) {  // a hello that claims to be rank 0
      send_bytes(silent_or_rubbish.get(), encode_hello({.rank_idx = 0, .num_ranks = 2}),
                 Deadline(kPatience));
      const Frame frame = recv_frame(silent_or_rubbish.get(), 0, Deadline(kPatience));
      ASSERT_TRUE(frame.error);
      EXPECT_TRUE(is_error(*frame.error, ErrorCode::kInvalidArgument, "rank 0 is here already"));
    }
  });
}

TEST(TcpBootstrapTest, ARankThatComesTwiceIsRefused) {
  const int port = free_port();
  std::atomic<int> num_refused = 0;
  run_threads(3, [&](int part) {
    if (part == 0) {
      EXPECT_TRUE(
          is_error(error_from([&] { make_tcp_bootstrap(0, 3, "127.0.0.1", port, seconds(1)); }),
                   ErrorCode::kTimeout, "rank 2 did not come to rank 0"));
      return;
    }
    const Error error =
        error_from([&] { make_tcp_bootstrap(1, 3, "127.0.0.1", port, seconds(1)); });
    if (error.code() == ErrorCode::kInvalidArgument) {
      ++num_refused;
      EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, "rank 1 is here already"));
    } else {
      EXPECT_TRUE(is_error(error, ErrorCode::kTimeout, "rank 2 did not come to rank 0"));
    }
  });
  EXPECT_EQ(num_refused, 1);
}

TEST(TcpBootstrapTest, ARankThatIsStartedAgainTakesItsPlace) {
  const int port = free_port();
  run_threads(3, [&](int rank) {
    if (rank == 1) {  // its first self says hello and ends
      send_bytes(connect_local(port).get(), encode_hello({.rank_idx = 1, .num_ranks = 3}),
                 Deadline(kPatience));
    }
    if (rank == 2) std::this_thread::sleep_for(milliseconds(300));
    gather_rounds(rank, 3, "127.0.0.1", port, 2);
  });
}

TEST(TcpBootstrapTest, EveryRankLearnsWhichOnesDidNotCome) {
  const int port = free_port();
  run_threads(2, [&](int rank) {
    EXPECT_TRUE(is_error(
        error_from([&] { make_tcp_bootstrap(rank, 4, "127.0.0.1", port, milliseconds(500)); }),
        ErrorCode::kTimeout, "ranks 2 and 3 did not come to rank 0"));
  });
}

TEST(TcpBootstrapTest, NamesThePlaceIfRankZeroDoesNotCome) {
  const int port = free_port();
  EXPECT_TRUE(is_error(
      error_from([&] { make_tcp_bootstrap(1, 2, "127.0.0.1", port, milliseconds(200)); }),
      ErrorCode::kTimeout, "connect 127.0.0.1:" + std::to_string(port) + ": ECONNREFUSED (111)"));
}

TEST(TcpBootstrapTest, ALateRankIsNamedByAllOthersAndEndsTheGroup) {
  const int port = free_port();
  run_threads(3, [&](int rank) {
    const auto bootstrap = make_tcp_bootstrap(rank, 3, "127.0.0.1", port, seconds(1));
    bootstrap->all_gather({});
    if (rank == 2) {
      std::this_thread::sleep_for(seconds(2));
      error_from([&] { bootstrap->all_gather({}); });
    } else {
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(is_error(error_from([&] { bootstrap->all_gather({}); }), ErrorCode::kTimeout,
                             "rank 2 did not come to all_gather within 1 s"));
      }
    }
  });
}

TEST(TcpBootstrapTest, ARankThatIsKilledIsNoticedBeforeTheTimeout) {
  const int port = free_port();
  ForkedProcess child([=] {
    const auto bootstrap = make_tcp_bootstrap(2, 3, "127.0.0.1", port, kPatience);
    bootstrap->all_gather({});
    ::sleep(60);
  });
  const Deadline deadline(seconds(30));
  run_threads(2, [&](int rank) {
    const auto bootstrap = make_tcp_bootstrap(rank, 3, "127.0.0.1", port, kPatience);
    bootstrap->all_gather({});
    if (rank == 0) child.kill();
    EXPECT_TRUE(
        is_error(error_from([&] { bootstrap->all_gather({}); }), ErrorCode::kPeer, "rank 2"));
  });
  EXPECT_FALSE(deadline.has_passed());
}

TEST(TcpBootstrapTest, AProgramThatARankStartsDoesNotInheritItsConnections) {
  const MeetingPlace place{.address = "127.0.0.1", .port = free_port()};
  run_threads(2, [&](int rank) {
    const UniqueFd connection = rank == 0
                                    ? std::move(host_meeting(2, place, Deadline(kPatience))[1])
                                    : join_meeting(1, 2, place, Deadline(kPatience));
    EXPECT_NE(::fcntl(connection.get(), F_GETFD) & FD_CLOEXEC, 0);
  });
}

TEST(TcpBootstrapTest, RefusesBadArguments) {
  const auto code_of = [](int rank, int num_ranks, const std::string& address, int port) {
    return error_from(
               [&] { make_tcp_bootstrap(rank, num_ranks, address, port, milliseconds(100)); })
        .code();
  };
  EXPECT_EQ(code_of(0, 0, "127.0.0.1", 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(2, 2, "127.0.0.1", 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(-1, 2, "127.0.0.1", 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(0, 2, "", 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(0, 2, "127.0.0.1", 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(0, 2, "127.0.0.1", 65536), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(0, 2, "192.0.2.1", 29500),
            ErrorCode::kInvalidArgument);  // of no host: RFC 5737
  EXPECT_EQ(code_of(0, 2, "no.such.host.invalid", 29500), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(1, 2, "no.such.host.invalid", 29500), ErrorCode::kInvalidArgument);
}

TEST(TcpBootstrapTest, NamesAPortThatIsTaken) {
  const int port = free_port();
  run_threads(2, [&](int rank) {
    const auto bootstrap = make_tcp_bootstrap(rank, 2, "127.0.0.1", port, kPatience);
    bootstrap->all_gather({});
  });
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  sockaddr_in address{};
  socklen_t num_bytes = sizeof(address);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &num_bytes), 0);
  EXPECT_TRUE(is_error(error_from([&] {
                         make_tcp_bootstrap(0, 2, "127.0.0.1", ntohs(address.sin_port), kPatience);
                       }),
                       ErrorCode::kSystem, "EADDRINUSE (98)"));
}

TEST(TcpBootstrapTest, RefusesAMessageThatIsTooLarge) {
  const auto bootstrap = make_tcp_bootstrap(0, 1, "127.0.0.1", 1);
  const Bytes large(kMaxMessageBytes + 1);
  EXPECT_TRUE(is_error(error_from([&] { bootstrap->all_gather(large); }),
                       ErrorCode::kInvalidArgument, "at most 16777216 bytes, got 16777217"));
}

}  // namespace
}  // namespace deep_ep
