#include "os/socket.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>

#include "os/process.hpp"
#include "os/shared_memory.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_from;
using testing::ForkedProcess;
using testing::is_error;

const std::array<std::byte, 3> kMessage{std::byte{1}, std::byte{2}, std::byte{3}};

std::string random_name() { return "deep_ep.test." + hex(random_id()); }
Deadline soon() { return Deadline(milliseconds(50)); }
Deadline later() { return Deadline(seconds(20)); }

struct Pair {
  std::string name = random_name();
  UniqueFd listener = listen_unix(name, 4);
  UniqueFd client = connect_unix(name, later());
  UniqueFd server = accept_unix(listener.get(), later());
};

TEST(SocketTest, CarriesBytesBetweenProcesses) {
  const std::string name = random_name();
  const UniqueFd listener = listen_unix(name, 4);
  ForkedProcess child([&] {
    const UniqueFd client = connect_unix(name, later());
    send_bytes(client.get(), kMessage, later());
  });
  const UniqueFd server = accept_unix(listener.get(), later());
  std::array<std::byte, 3> received{};
  recv_bytes(server.get(), received, later());
  EXPECT_EQ(received, kMessage);
  EXPECT_EQ(peer_pid(server.get()), child.pid());
  EXPECT_EQ(child.wait(), 0);
}

TEST(SocketTest, PassesADescriptorThatIsClosedOnExec) {
  const Pair pair;
  const UniqueFd memory = create_shared_memory("test", 4096);
  send_bytes(pair.client.get(), kMessage, later());
  send_descriptor(pair.client.get(), memory.get(), later());
  std::array<std::byte, 3> received{};
  recv_bytes(pair.server.get(), received, later());
  const UniqueFd passed = recv_descriptor(pair.server.get(), later());
  EXPECT_NE(passed.get(), memory.get());
  EXPECT_NE(::fcntl(passed.get(), F_GETFD) & FD_CLOEXEC, 0);
  struct stat sent {
  }, got{};
  ASSERT_EQ(::fstat(memory.get(), &sent), 0);
  ASSERT_EQ(::fstat(passed.get(), &got), 0);
  EXPECT_EQ(sent.st_ino, got.st_ino);
}

TEST(SocketTest, RefusesBytesWhereADescriptorIsDue) {
  const Pair pair;
  send_bytes(pair.client.get(), kMessage, later());
  EXPECT_TRUE(is_error(error_from([&] { recv_descriptor(pair.server.get(), later()); }),
                       ErrorCode::kPeer, "no descriptor came"));
}

TEST(SocketTest, RefusesMoreThanOneDescriptorAndLeaksNone) {
  const Pair pair;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control{};
  char payload = 0;
  iovec vector{.iov_base = &payload, .iov_len = 1};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(2 * sizeof(int));
  const std::array<int, 2> fds{pair.client.get(), pair.client.get()};
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
  ASSERT_EQ(::sendmsg(pair.client.get(), &message, 0), 1);

  const int next_fd = ::dup(0);
  ::close(next_fd);
  EXPECT_TRUE(is_error(error_from([&] { recv_descriptor(pair.server.get(), later()); }),
                       ErrorCode::kPeer, "more than one descriptor"));
  const int still_next_fd = ::dup(0);
  ::close(still_next_fd);
  EXPECT_EQ(next_fd, still_next_fd);
}

TEST(SocketTest, EveryWaitEndsAtItsDeadline) {
  const Pair pair;
  std::array<std::byte, 3> buffer{};
  const std::vector<std::byte> large(std::size_t{8} << 20);
  EXPECT_EQ(error_from([&] { accept_unix(pair.listener.get(), soon()); }).code(),
            ErrorCode::kTimeout);
  EXPECT_TRUE(is_error(error_from([&] { recv_bytes(pair.client.get(), buffer, soon()); }),
                       ErrorCode::kTimeout, "within 0.05 s"));
  EXPECT_EQ(error_from([&] { recv_descriptor(pair.client.get(), soon()); }).code(),
            ErrorCode::kTimeout);
  EXPECT_EQ(error_from([&] { send_bytes(pair.client.get(), large, soon()); }).code(),
            ErrorCode::kTimeout);
}

TEST(SocketTest, ConnectWaitsForAFullBacklogUntilItsDeadline) {
  const std::string name = random_name();
  const UniqueFd listener = listen_unix(name, 0);
  const UniqueFd first = connect_unix(name, later());
  EXPECT_TRUE(is_error(error_from([&] { connect_unix(name, soon()); }), ErrorCode::kTimeout,
                       "backlog full"));
}

TEST(SocketTest, ErrorsNameCallAndAddress) {
  const std::string name = random_name();
  EXPECT_TRUE(is_error(error_from([&] { connect_unix(name, soon()); }), ErrorCode::kSystem,
                       "connect @" + name + ": ECONNREFUSED (111)"));
  const UniqueFd listener = listen_unix(name, 1);
  EXPECT_TRUE(is_error(error_from([&] { listen_unix(name, 1); }), ErrorCode::kSystem,
                       "bind @" + name + ": EADDRINUSE (98)"));
  EXPECT_EQ(error_from([] { listen_unix("", 1); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_from([] { listen_unix(std::string(101, 'x'), 1); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_TRUE(is_error(error_from([] { peer_pid(-1); }), ErrorCode::kSystem, "EBADF"));
}

TEST(SocketTest, TheEndOfTheOtherEndIsAPeerError) {
  Pair pair;
  EXPECT_FALSE(has_hung_up(pair.server.get()));
  send_bytes(pair.client.get(), kMessage, later());
  pair.client.reset();
  EXPECT_TRUE(has_hung_up(pair.server.get()));
  std::array<std::byte, 4> buffer{};
  EXPECT_TRUE(is_error(error_from([&] { recv_bytes(pair.server.get(), buffer, later()); }),
                       ErrorCode::kPeer, "closed after 3 of 4 bytes"));
  EXPECT_TRUE(is_error(error_from([&] { recv_descriptor(pair.server.get(), later()); }),
                       ErrorCode::kPeer, "closed"));
  EXPECT_TRUE(is_error(error_from([&] { send_bytes(pair.server.get(), kMessage, later()); }),
                       ErrorCode::kPeer, "EPIPE"));
}

TEST(SocketTest, ANameIsFreeOnceItsOwnerIsKilled) {
  const std::string name = random_name();
  ForkedProcess child([&] {
    const UniqueFd listener = listen_unix(name, 4);
    ::sleep(60);
  });
  const Deadline deadline = later();
  for (UniqueFd client; !client && !deadline.has_passed();) {
    try {
      client = connect_unix(name, later());
    } catch (const Error&) {
      ::usleep(1000);  // the child does not listen yet
    }
  }
  child.kill();
  child.wait();
  EXPECT_TRUE(listen_unix(name, 4));
}

TEST(SocketTest, WaitReadableGivesThoseWithInput) {
  const Pair quiet;
  const Pair loud;
  const std::array<int, 2> sockets{quiet.server.get(), loud.server.get()};
  EXPECT_TRUE(wait_readable(sockets, soon()).empty());
  send_bytes(loud.client.get(), kMessage, later());
  EXPECT_EQ(wait_readable(sockets, later()), std::vector<std::size_t>{1});
}

}  // namespace
}  // namespace deep_ep
