#pragma once
// A TCP port for a test to listen at, and plain connections to it.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>

#include "os/fd.hpp"

namespace deep_ep::testing {

/// A port of 127.0.0.1 that nobody listened at a moment ago.
inline int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t num_bytes = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket.get(), generic, num_bytes) != 0 ||
      ::getsockname(socket.get(), generic, &num_bytes) != 0) {
    throw std::runtime_error("no free port");
  }
  return ntohs(address.sin_port);
}

/// A blocking connection to `port` of 127.0.0.1; retries for some seconds.
inline UniqueFd connect_local(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  for (int i = 0; i < 5000; ++i) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      return socket;
    }
    ::usleep(1000);
  }
  throw std::runtime_error("nobody listens");
}

}  // namespace deep_ep::testing
