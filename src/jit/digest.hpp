#pragma once
// FNV-1a of 128 bits: tells texts apart that differ by accident, not by malice.
#include <cstdint>
#include <string>
#include <string_view>

namespace deep_ep::jit {

class Digest {
 public:
  /// The bytes, with no mark where they begin or end.
  Digest& add_bytes(std::string_view bytes) noexcept {
    for (const char byte : bytes) {
      state_ ^= static_cast<unsigned char>(byte);
      state_ *= kPrime;
    }
    return *this;
  }

  /// A component: its length comes first, so that no two lists of components are the same bytes.
  Digest& add(std::string_view text) noexcept {
    std::uint64_t length = text.size();
    for (int i = 0; i < 8; ++i, length >>= 8U) {
      const char byte = static_cast<char>(length & 0xffU);
      add_bytes({&byte, 1});
    }
    return add_bytes(text);
  }

  /// 32 hexadecimal digits.
  std::string hex() const {
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4) {
      text += "0123456789abcdef"[static_cast<unsigned>(state_ >> shift) & 15U];
    }
    return text;
  }

 private:
  __extension__ using State = unsigned __int128;  // all our compilers have it; ISO C++ does not
  static constexpr State kPrime = (State{1} << 88U) + 0x13b;

  State state_ = (State{0x6c62272e07bb0142} << 64U) + 0x62b821756295c58d;
};

}  // namespace deep_ep::jit
