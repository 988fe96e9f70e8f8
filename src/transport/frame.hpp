#pragma once
// One message on a TCP connection between a rank and rank 0: bytes, or why there are none.
#include <cstddef>
#include <optional>
#include <span>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "os/deadline.hpp"

namespace deep_ep {

/// Most that one rank may give to an all_gather: far above any use, far below what hurts.
inline constexpr std::size_t kMaxMessageBytes = std::size_t{16} << 20;

/// Size of what precedes the payload.
inline constexpr std::size_t kFrameHeaderBytes = 12;

/// What the first bytes of a frame announce.
struct FrameHeader {
  bool is_error = false;  ///< the payload is an Error as the wire writes it
  std::size_t payload_bytes = 0;
};

struct Frame {
  std::optional<Error> error;  ///< the sender gave up: the payload is empty
  Bytes payload;
};

/// Throws kInvalidArgument if the bytes are no header or announce more than `max_bytes`.
FrameHeader parse_frame_header(std::span<const std::byte> bytes, std::size_t max_bytes);

/// Throws as send_bytes does.
void send_frame(int socket, std::span<const std::byte> payload, const Deadline& deadline);
void send_error_frame(int socket, const Error& error, const Deadline& deadline);

/// Throws as recv_bytes and parse_frame_header do.
Frame recv_frame(int socket, std::size_t max_bytes, const Deadline& deadline);

}  // namespace deep_ep
