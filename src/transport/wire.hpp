#pragma once
// How values become bytes that another process reads. Little-endian, lengths before contents, and
// every read checked: what arrives may come from anybody.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "os/process.hpp"

namespace deep_ep {

/// Appends values to a byte string.
class WireWriter {
 public:
  void put_u32(std::uint32_t value);
  void put_u64(std::uint64_t value);
  void put_id(const Id128& id);
  void put_bytes(std::span<const std::byte> bytes);   ///< u64 length, then the bytes
  void put_text(std::string_view text);               ///< as put_bytes
  void put_error(const std::optional<Error>& error);  ///< u32 code + 1 and the text, or u32 0

  const Bytes& bytes() const noexcept { return bytes_; }
  Bytes take() noexcept { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

/// Reads values back in the order they were put. Throws kPeer where the bytes do not have them.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) noexcept : rest_(bytes) {}

  std::uint32_t take_u32();
  std::uint64_t take_u64();
  Id128 take_id();
  Bytes take_bytes();
  std::string take_text();
  std::optional<Error> take_error();

  /// Throws kPeer unless all has been read.
  void require_end() const;

 private:
  std::span<const std::byte> take(std::uint64_t num_bytes);

  std::span<const std::byte> rest_;
};

}  // namespace deep_ep
