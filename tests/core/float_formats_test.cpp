#include "core/float_formats.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace deep_ep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The compiler can evaluate all of them.
static_assert(bf16_from_float(1.0f) == 0x3f80);
static_assert(float_from_bf16(0xc040) == -3.0f);
static_assert(e4m3_from_float(448.0f) == 0x7e);
static_assert(float_from_e4m3(0x38) == 1.0f);
static_assert(float_from_ue8m0(ue8m0_from_float(0.75f)) == 1.0f);

TEST(Bf16Test, EveryPatternComesBackAndNaNsBecomeQuiet) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = float_from_bf16(static_cast<std::uint16_t>(bits));
    const bool is_nan = (bits & 0x7fffu) > 0x7f80u;
    ASSERT_EQ(std::isnan(value), is_nan) << bits;
    ASSERT_EQ(bf16_from_float(value), is_nan ? bits | 0x40u : bits) << bits;
  }
}

TEST(Bf16Test, EveryPatternHasTheValueThatItsFieldsSay) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const int exponent = static_cast<int>(bits >> 7 & 0xff);
    if (exponent == 255) continue;  // infinities and NaNs
    const auto fraction = static_cast<double>(bits & 0x7f);
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -133) : std::ldexp(fraction + 128, exponent - 134);
    ASSERT_EQ(float_from_bf16(static_cast<std::uint16_t>(bits)),
              static_cast<float>(bits & 0x8000 ? -magnitude : magnitude))
        << bits;
  }
}

TEST(Bf16Test, RoundsToTheNearestAndTiesToEven) {
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {  // every finite positive value
    const std::uint32_t next = bits + 1, even = bits % 2 == 0 ? bits : next;
    const auto round = [&](std::uint32_t tail) {
      return bf16_from_float(std::bit_cast<float>(bits << 16 | tail));
    };
    ASSERT_EQ(round(0x7fff), bits);
    ASSERT_EQ(round(0x8000), even);
    ASSERT_EQ(round(0x8001), next);
  }
}

TEST(Bf16Test, SignAndInfinityStayAndOverflowBecomesInfinity) {
  EXPECT_EQ(bf16_from_float(-0.0f), 0x8000);
  EXPECT_EQ(bf16_from_float(-kInfinity), 0xff80);
  EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(E4M3Test, EveryPatternHasTheValueThatItsFieldsSay) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = float_from_e4m3(static_cast<std::uint8_t>(bits));
    const int exponent = bits >> 3 & 0xf, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(fraction + 8, exponent - 10);
    EXPECT_EQ(value, bits & 0x80 ? -magnitude : magnitude) << bits;
    EXPECT_EQ(std::signbit(value), bits >= 128) << bits;
  }
}

TEST(E4M3Test, EveryPatternComesBack) {
  for (int bits = 0; bits < 256; ++bits) {
    EXPECT_EQ(e4m3_from_float(float_from_e4m3(static_cast<std::uint8_t>(bits))), bits);
  }
}

TEST(E4M3Test, RoundsToTheNearestAndTiesToEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {  // both neighbours are finite and positive
    const float low = float_from_e4m3(static_cast<std::uint8_t>(bits));
    const float high = float_from_e4m3(static_cast<std::uint8_t>(bits + 1));
    const float middle = (low + high) / 2;  // exact: FP32 has bits to spare
    EXPECT_EQ(e4m3_from_float(middle), bits % 2 == 0 ? bits : bits + 1) << middle;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, 0.0f)), bits) << middle;
    EXPECT_EQ(e4m3_from_float(std::nextafter(middle, kInfinity)), bits + 1) << middle;
    EXPECT_EQ(e4m3_from_float(-middle), 0x80 | (bits % 2 == 0 ? bits : bits + 1)) << middle;
  }
}

TEST(E4M3Test, LargeValuesSaturateAndNaNStays) {
  for (const float value : {448.0f, 449.0f, 464.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(e4m3_from_float(value), 0x7e) << value;
    EXPECT_EQ(e4m3_from_float(-value), 0xfe) << value;
  }
  EXPECT_EQ(e4m3_from_float(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
}

TEST(Ue8m0Test, EveryScaleIsAPowerOfTwoAndComesBack) {
  for (int bits = 0; bits < 255; ++bits) {
    const float scale = float_from_ue8m0(static_cast<std::uint8_t>(bits));
    EXPECT_EQ(scale, std::ldexp(1.0, bits - 127));
    EXPECT_EQ(ue8m0_from_float(scale), bits);
  }
  EXPECT_TRUE(std::isnan(float_from_ue8m0(255)));
}

TEST(Ue8m0Test, RoundsUpAndKeepsNaN) {
  EXPECT_EQ(ue8m0_from_float(0.0f), 0);
  EXPECT_EQ(ue8m0_from_float(std::nextafter(1.0f, 0.0f)), 127);
  EXPECT_EQ(ue8m0_from_float(std::nextafter(1.0f, 2.0f)), 128);
  EXPECT_EQ(ue8m0_from_float(std::nextafter(0x1p-127f, 1.0f)), 1);
  EXPECT_EQ(ue8m0_from_float(kInfinity), 254);
  EXPECT_EQ(ue8m0_from_float(std::numeric_limits<float>::quiet_NaN()), 255);
}

TEST(Ue8m0Test, FourScalesArePackedLittleEndian) {
  EXPECT_EQ(pack_ue8m0(0x01, 0x02, 0x03, 0xff), static_cast<std::int32_t>(0xff030201u));
}

}  // namespace
}  // namespace deep_ep
