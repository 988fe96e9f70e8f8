#pragma once
// Stream sockets between processes: Unix sockets in the abstract namespace, bounded sends and
// receives (of TCP sockets too), and passing a descriptor.
//
// An abstract name is no file: nothing is left behind when its owner is killed. It belongs to a
// network namespace, so containers that do not share one cannot meet.
#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "os/deadline.hpp"
#include "os/fd.hpp"

namespace deep_ep {

/// Listens at the abstract name `name`, with room for `backlog` connections before accept.
/// Throws kInvalidArgument if the name is empty or longer than 100 bytes, kSystem if it is taken.
UniqueFd listen_unix(const std::string& name, int backlog);

/// Connects to the abstract name; waits only while the backlog is full. Throws kSystem, kTimeout.
UniqueFd connect_unix(const std::string& name, const Deadline& deadline);

/// The next connection. Throws kSystem, kTimeout.
UniqueFd accept_unix(int listener, const Deadline& deadline);

/// Sends all bytes. Throws kPeer if the other end is closed, kTimeout, kSystem.
void send_bytes(int socket, std::span<const std::byte> bytes, const Deadline& deadline);

/// Receives exactly `bytes.size()` bytes. Throws kPeer if the other end closes first, kTimeout,
/// kSystem.
void recv_bytes(int socket, std::span<std::byte> bytes, const Deadline& deadline);

/// Gives the process at the other end of a Unix socket a descriptor of the same open file.
/// Throws kPeer, kTimeout, kSystem.
void send_descriptor(int socket, int fd, const Deadline& deadline);

/// The descriptor of one send_descriptor, closed on exec. Throws kPeer if the other end is closed
/// or sent something else, kTimeout, kSystem.
UniqueFd recv_descriptor(int socket, const Deadline& deadline);

/// The process that connected or listened at the other end of a Unix socket; 0 if it lives in a pid
/// namespace that this process cannot see. Throws kSystem.
pid_t peer_pid(int socket);

/// Whether the other end is closed, by its process or by the process's end. Unread bytes do not
/// count.
bool has_hung_up(int socket) noexcept;

/// Waits until at least one of the sockets has input, a connection or the other end's close to
/// report; gives the indices of those. Empty when the deadline has passed. Throws kSystem.
std::vector<std::size_t> wait_readable(std::span<const int> sockets, const Deadline& deadline);

}  // namespace deep_ep
