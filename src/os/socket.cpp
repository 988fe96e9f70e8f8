#include "os/socket.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/check.hpp"
#include "os/system_error.hpp"

namespace deep_ep {
namespace {

struct Address {
  sockaddr_un data{};
  socklen_t num_bytes = 0;
};

Address abstract_address(const std::string& name) {
  require(!name.empty() && name.size() <= 100,
          "the name of a socket must have 1 to 100 bytes, got ", name.size());
  Address address;
  address.data.sun_family = AF_UNIX;
  // sun_path[0] stays 0: that makes the name abstract, and its length, not a 0 at its end, bounds
  // it
  std::memcpy(address.data.sun_path + 1, name.data(), name.size());
  address.num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

UniqueFd open_unix_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_system_error(errno, "socket AF_UNIX");
  return socket;
}

/// Waits until poll() reports something; false when the deadline has passed.
bool poll_until(std::span<pollfd> queries, const Deadline& deadline) {
  for (;;) {
    const int num_ready = ::poll(queries.data(), queries.size(), deadline.remaining_poll_ms());
    if (num_ready > 0) return true;
    if (num_ready < 0 && errno != EINTR) throw_system_error(errno, "poll");
    if (num_ready == 0 && deadline.has_passed()) return false;
  }
}

/// What to do about a call on `socket` that failed with `error`: returns to have it called again
/// once the socket is ready, or throws.
void wait_or_throw(const char* call, int socket, int error, short events,
                   const Deadline& deadline) {
  if (error == EINTR) return;
  if (error == EAGAIN) {
    pollfd query{.fd = socket, .events = events, .revents = 0};
    if (poll_until({&query, 1}, deadline)) return;
    throw Error(ErrorCode::kTimeout,
                concat(call, " on socket ", socket, ": not ready within ", deadline.limit_text()));
  }
  if (error == EPIPE || error == ECONNRESET) {
    throw Error(ErrorCode::kPeer, concat(call, " on socket ", socket,
                                         ": the other end is closed: ", errno_text(error)));
  }
  throw_system_error(error, call, " on socket ", socket);
}

/// Room for the control message of exactly one descriptor: with CMSG_SPACE, which rounds up, a
/// second one would fit and leak.
struct DescriptorControl {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> buffer{};
  std::byte payload{};  // a stream carries a descriptor with at least one byte
  iovec payload_vector{.iov_base = &payload, .iov_len = 1};
  msghdr message{};

  DescriptorControl() {
    message.msg_iov = &payload_vector;
    message.msg_iovlen = 1;
    message.msg_control = buffer.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));
  }
  DescriptorControl(const DescriptorControl&) = delete;  // it points into itself
  DescriptorControl& operator=(const DescriptorControl&) = delete;
};

}  // namespace

UniqueFd listen_unix(const std::string& name, int backlog) {
  const Address address = abstract_address(name);
  UniqueFd socket = open_unix_socket();
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address.data);
  if (::bind(socket.get(), generic, address.num_bytes) != 0) {
    throw_system_error(errno, "bind @", name);
  }
  if (::listen(socket.get(), backlog) != 0) throw_system_error(errno, "listen @", name);
  return socket;
}

UniqueFd connect_unix(const std::string& name, const Deadline& deadline) {
  const Address address = abstract_address(name);
  UniqueFd socket = open_unix_socket();
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address.data);
  while (::connect(socket.get(), generic, address.num_bytes) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    // EAGAIN: the backlog is full, and no event tells when it no longer is
    if (error != EAGAIN) throw_system_error(error, "connect @", name);
    if (deadline.has_passed()) {
      throw Error(ErrorCode::kTimeout,
                  concat("connect @", name, ": backlog full for ", deadline.limit_text()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return socket;
}

UniqueFd accept_unix(int listener, const Deadline& deadline) {
  for (;;) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) return socket;
    wait_or_throw("accept", listener, errno, POLLIN, deadline);
  }
}

// MSG_DONTWAIT below: the deadline holds also on a socket that its maker left in blocking mode.

void send_bytes(int socket, std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else {
      wait_or_throw("send", socket, errno, POLLOUT, deadline);
    }
  }
}

void recv_bytes(int socket, std::span<std::byte> bytes, const Deadline& deadline) {
  const std::size_t num_bytes = bytes.size();
  while (!bytes.empty()) {
    const ssize_t received = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (received == 0) {
      throw Error(ErrorCode::kPeer,
                  concat("recv on socket ", socket, ": the other end closed after ",
                         num_bytes - bytes.size(), " of ", num_bytes, " bytes"));
    }
    if (received > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(received));
    } else {
      wait_or_throw("recv", socket, errno, POLLIN, deadline);
    }
  }
}

void send_descriptor(int socket, int fd, const Deadline& deadline) {
  DescriptorControl control;
  cmsghdr* const header = CMSG_FIRSTHDR(&control.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  while (::sendmsg(socket, &control.message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    wait_or_throw("sendmsg SCM_RIGHTS", socket, errno, POLLOUT, deadline);
  }
}

UniqueFd recv_descriptor(int socket, const Deadline& deadline) {
  DescriptorControl control;
  ssize_t received = 0;
  while ((received = ::recvmsg(socket, &control.message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    wait_or_throw("recvmsg SCM_RIGHTS", socket, errno, POLLIN, deadline);
  }
  UniqueFd fd;
  const cmsghdr* const header = CMSG_FIRSTHDR(&control.message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int value = FdTraits::kNull;
    std::memcpy(&value, CMSG_DATA(header), sizeof(int));
    fd.reset(value);
  }
  if (fd && (control.message.msg_flags & MSG_CTRUNC) == 0) return fd;
  // MSG_CTRUNC without a descriptor: the kernel had no free one for us
  const char* const reason =
      received == 0 ? "the other end is closed"
      : (control.message.msg_flags & MSG_CTRUNC) != 0
          ? "more than one descriptor came, or this process has too many open"
          : "no descriptor came";
  throw Error(ErrorCode::kPeer, concat("recvmsg SCM_RIGHTS on socket ", socket, ": ", reason));
}

pid_t peer_pid(int socket) {
  ucred credentials{};
  socklen_t num_bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &num_bytes) != 0) {
    throw_system_error(errno, "getsockopt SO_PEERCRED on socket ", socket);
  }
  return credentials.pid;
}

bool has_hung_up(int socket) noexcept {
  pollfd query{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return ::poll(&query, 1, 0) > 0 && (query.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

std::vector<std::size_t> wait_readable(std::span<const int> sockets, const Deadline& deadline) {
  std::vector<pollfd> queries;
  for (const int socket : sockets)
    queries.push_back({.fd = socket, .events = POLLIN, .revents = 0});
  std::vector<std::size_t> ready;
  if (!poll_until(queries, deadline)) return ready;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    if (queries[i].revents != 0) ready.push_back(i);
  }
  return ready;
}

}  // namespace deep_ep
