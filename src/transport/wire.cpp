#include "transport/wire.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace deep_ep {

void WireWriter::put_u32(std::uint32_t value) {
  for (unsigned shift = 0; shift < 32; shift += 8) {
    bytes_.push_back(static_cast<std::byte>((value >> shift) & 255U));
  }
}

void WireWriter::put_u64(std::uint64_t value) {
  put_u32(static_cast<std::uint32_t>(value));
  put_u32(static_cast<std::uint32_t>(value >> 32U));
}

void WireWriter::put_id(const Id128& id) {
  const auto bytes = std::as_bytes(std::span(id));
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void WireWriter::put_bytes(std::span<const std::byte> bytes) {
  put_u64(bytes.size());
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void WireWriter::put_text(std::string_view text) { put_bytes(std::as_bytes(std::span(text))); }

void WireWriter::put_error(const std::optional<Error>& error) {
  put_u32(error ? static_cast<std::uint32_t>(error->code()) + 1 : 0);
  if (error) put_text(error->what());
}

std::span<const std::byte> WireReader::take(std::uint64_t num_bytes) {
  if (num_bytes > rest_.size()) {
    throw Error(ErrorCode::kPeer, concat("message is cut off: ", num_bytes,
                                         " more bytes expected, ", rest_.size(), " left"));
  }
  const auto taken = rest_.first(static_cast<std::size_t>(num_bytes));
  rest_ = rest_.subspan(taken.size());
  return taken;
}

std::uint32_t WireReader::take_u32() {
  std::uint32_t value = 0;
  unsigned shift = 0;
  for (const std::byte byte : take(4)) {
    value |= std::to_integer<std::uint32_t>(byte) << shift;
    shift += 8;
  }
  return value;
}

std::uint64_t WireReader::take_u64() {
  const std::uint64_t low = take_u32();
  return low | (std::uint64_t{take_u32()} << 32U);
}

Id128 WireReader::take_id() {
  Id128 id;
  const auto taken = take(id.size());
  std::ranges::transform(taken, id.begin(), std::to_integer<std::uint8_t>);
  return id;
}

Bytes WireReader::take_bytes() {
  const auto taken = take(take_u64());
  return {taken.begin(), taken.end()};
}

std::string WireReader::take_text() {
  const auto taken = take(take_u64());
  return {reinterpret_cast<const char*>(taken.data()), taken.size()};
}

std::optional<Error> WireReader::take_error() {
  const std::uint32_t code = take_u32();
  if (code == 0) return std::nullopt;
  if (code > static_cast<std::uint32_t>(ErrorCode::kInternal) + 1) {
    throw Error(ErrorCode::kPeer, concat("message has no valid status: ", code));
  }
  return Error(static_cast<ErrorCode>(code - 1), take_text());
}

void WireReader::require_end() const {
  if (!rest_.empty()) {
    throw Error(ErrorCode::kPeer, concat("message has ", rest_.size(), " bytes too many"));
  }
}

}  // namespace deep_ep
