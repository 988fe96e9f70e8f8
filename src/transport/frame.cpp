#include "transport/frame.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "os/socket.hpp"
#include "transport/wire.hpp"

namespace deep_ep {
namespace {

// Unlikely first bytes of any other protocol: what is no rank of this library is told apart here.
constexpr std::uint32_t kPayloadMagic = 0x0a50'4501;
constexpr std::uint32_t kErrorMagic = 0x0a50'4502;

constexpr std::size_t kMaxErrorBytes = 16384;  // names each of some thousand ranks at worst

void send(int socket, std::uint32_t magic, std::span<const std::byte> payload,
          const Deadline& deadline) {
  WireWriter writer;
  writer.put_u32(magic);
  writer.put_bytes(payload);  // one buffer, so that header and payload leave in one packet
  send_bytes(socket, writer.bytes(), deadline);
}

}  // namespace

FrameHeader parse_frame_header(std::span<const std::byte> bytes, std::size_t max_bytes) {
  WireReader reader(bytes);
  const std::uint32_t magic = reader.take_u32();
  const std::uint64_t payload_bytes = reader.take_u64();
  require(magic == kPayloadMagic || magic == kErrorMagic,
          "the other end of the connection must be a rank of this library");
  const std::size_t limit = magic == kErrorMagic ? kMaxErrorBytes : max_bytes;
  require(payload_bytes <= limit, "a message must have at most ", limit, " bytes, got ",
          payload_bytes);
  return {.is_error = magic == kErrorMagic,
          .payload_bytes = static_cast<std::size_t>(payload_bytes)};
}

void send_frame(int socket, std::span<const std::byte> payload, const Deadline& deadline) {
  send(socket, kPayloadMagic, payload, deadline);
}

void send_error_frame(int socket, const Error& error, const Deadline& deadline) {
  const std::string text = std::string(error.what()).substr(0, kMaxErrorBytes / 2);
  WireWriter writer;
  writer.put_error(Error(error.code(), text));
  send(socket, kErrorMagic, writer.bytes(), deadline);
}

Frame recv_frame(int socket, std::size_t max_bytes, const Deadline& deadline) {
  std::array<std::byte, kFrameHeaderBytes> header_bytes{};
  recv_bytes(socket, header_bytes, deadline);
  const FrameHeader header = parse_frame_header(header_bytes, max_bytes);
  Bytes payload(header.payload_bytes);
  recv_bytes(socket, payload, deadline);
  if (!header.is_error) return {.error = std::nullopt, .payload = std::move(payload)};
  WireReader reader(payload);
  std::optional<Error> error = reader.take_error();
  internal_check(error.has_value(), "an error frame holds an error");
  return {.error = std::move(error), .payload = {}};
}

}  // namespace deep_ep
