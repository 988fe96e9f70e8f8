#pragma once
// The small float formats that cross the API, as bits: BF16, FP8 E4M3 and UE8M0 scales.
#include <bit>
#include <cstdint>
#include <limits>

namespace deep_ep {

/// The value of BF16 bits, exactly.
constexpr float float_from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

/// BF16 bits of `value`, rounded to nearest even. A NaN stays a NaN and becomes quiet.
constexpr std::uint16_t bf16_from_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  // Half a unit less one, plus the last kept bit: a tie goes up only from an odd value.
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline constexpr float kMaxE4M3 = 448.0f;

/// The value of FP8 E4M3 bits (the "fn" variant: no infinities, 0x7f and 0xff are NaN), exactly.
constexpr float float_from_e4m3(std::uint8_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x80u) << 24, exponent = (bits >> 3) & 0xfu,
                      mantissa = bits & 7u;
  if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {  // subnormal: mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 127 - 7) << 23) | (mantissa << 20));
}

/// FP8 E4M3 bits of `value`, rounded to nearest even; magnitudes above 448 become 448, NaN stays
/// NaN.
constexpr std::uint8_t e4m3_from_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<std::uint32_t>(kMaxE4M3)) {
    return static_cast<std::uint8_t>(sign | 0x7eu);
  }
  if (magnitude < std::bit_cast<std::uint32_t>(0x1p-6f)) {
    // The unit of FP32 in [2^14, 2^15) is 2^-9, the unit of E4M3 subnormals: the addition rounds.
    constexpr float kShift = 0x1p14f;
    const auto shifted = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kShift);
    return static_cast<std::uint8_t>(sign | (shifted - std::bit_cast<std::uint32_t>(kShift)));
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded >> 20) - ((127 - 7) << 3)));
}

/// The scale 2^(bits - 127); 255 is NaN.
constexpr float float_from_ue8m0(std::uint8_t bits) noexcept {
  if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(bits == 0 ? 0x00400000u : std::uint32_t{bits} << 23);
}

/// The smallest UE8M0 scale that is not below `scale` (positive); NaN stays NaN, infinity becomes
/// 2^127.
constexpr std::uint8_t ue8m0_from_float(float scale) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  if (bits > 0x7f800000u) return 255;  // NaN, and whatever is negative
  if (bits <= 0x00400000u) return 0;   // up to 2^-127
  const std::uint32_t exponent = (bits + 0x7fffffu) >> 23;
  return static_cast<std::uint8_t>(exponent < 254 ? exponent : 254);
}

/// Four UE8M0 scales in the int32 that carries them, the first in the lowest byte.
constexpr std::int32_t pack_ue8m0(std::uint8_t first, std::uint8_t second, std::uint8_t third,
                                  std::uint8_t fourth) noexcept {
  return std::bit_cast<std::int32_t>(first | std::uint32_t{second} << 8 |
                                     std::uint32_t{third} << 16 | std::uint32_t{fourth} << 24);
}

}  // namespace deep_ep
