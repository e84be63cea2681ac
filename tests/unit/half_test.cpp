#include "core/half.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a 16-bit pattern means, by the definition of the format.
double value_of(std::uint32_t half, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto mantissa = static_cast<int>(half & ((1U << mantissa_bits) - 1U));
  const auto exponent = static_cast<int>((half & 0x7FFFU) >> mantissa_bits);
  const double sign = (half & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign *
         std::ldexp(
             mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Checks every rounding decision of a format: between each pair of neighbours
// lies one middle; at it the even pattern wins, beside it the nearer one.
// Rounding never decreases, so this settles all floats.
template <typename Convert>
void expect_nearest_even(Convert convert, int exponent_bits) {
  const std::uint32_t infinity = ((1U << exponent_bits) - 1U)
                                 << (15 - exponent_bits);
  for (std::uint32_t low = 0; low < infinity; ++low) {
    const std::uint32_t high = low + 1;
    const double below = value_of(low, exponent_bits);
    // Infinity stands where the next finite value would be.
    const double above = high < infinity
                             ? value_of(high, exponent_bits)
                             : 2 * below - value_of(low - 1, exponent_bits);
    const auto middle = static_cast<float>((below + above) / 2);
    const std::uint32_t even = (low & 1U) == 0 ? low : high;
    ASSERT_EQ(convert(middle), even) << "at " << middle;
    ASSERT_EQ(convert(std::nextafter(middle, 0.0F)), low) << "at " << middle;
    ASSERT_EQ(convert(std::nextafter(middle, kInfinity)), high)
        << "at " << middle;
    ASSERT_EQ(convert(-middle), 0x8000U | even) << "at " << -middle;
    ASSERT_EQ(convert(std::nextafter(-middle, 0.0F)), 0x8000U | low);
    ASSERT_EQ(convert(std::nextafter(-middle, -kInfinity)), 0x8000U | high);
  }
}

TEST(HalfTest, ReadsEveryFloat16) {
  for (std::uint32_t half = 0; half <= 0xFFFFU; ++half) {
    const double want = value_of(half, 5);
    const float got = from_float16(static_cast<std::uint16_t>(half));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << half;
    } else {
      ASSERT_EQ(got, want) << half;
    }
    ASSERT_EQ(std::signbit(got), (half & 0x8000U) != 0) << half;
  }
}

TEST(HalfTest, ReadsEveryBFloat16) {
  for (std::uint32_t half = 0; half <= 0xFFFFU; ++half) {
    const double want = value_of(half, 8);
    const float got = from_bfloat16(static_cast<std::uint16_t>(half));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << half;
    } else {
      ASSERT_EQ(got, want) << half;
    }
    ASSERT_EQ(std::signbit(got), (half & 0x8000U) != 0) << half;
  }
}

TEST(HalfTest, WritesEveryFloat16BackUnchanged) {
  for (std::uint32_t half = 0; half <= 0xFFFFU; ++half) {
    const float value = from_float16(static_cast<std::uint16_t>(half));
    // A signalling NaN becomes quiet, everything else keeps its bits.
    const std::uint32_t want = std::isnan(value) ? half | 0x200U : half;
    ASSERT_EQ(to_float16(value), want);
  }
}

TEST(HalfTest, WritesEveryBFloat16BackUnchangedExceptNaN) {
  for (std::uint32_t half = 0; half <= 0xFFFFU; ++half) {
    const float value = from_bfloat16(static_cast<std::uint16_t>(half));
    ASSERT_EQ(to_bfloat16(value), std::isnan(value) ? 0x7FC0U : half);
  }
}

TEST(HalfTest, RoundsToTheNearestFloat16TiesToEven) {
  expect_nearest_even(to_float16, 5);
}

TEST(HalfTest, RoundsToTheNearestBFloat16TiesToEven) {
  expect_nearest_even(to_bfloat16, 8);
}

TEST(HalfTest, OverflowsToInfinityFrom65520On) {
  EXPECT_EQ(to_float16(65504.0F), 0x7BFFU);
  EXPECT_EQ(to_float16(std::nextafter(65520.0F, 0.0F)), 0x7BFFU);
  EXPECT_EQ(to_float16(65520.0F), 0x7C00U);
  EXPECT_EQ(to_float16(-65520.0F), 0xFC00U);
  EXPECT_EQ(to_float16(std::numeric_limits<float>::max()), 0x7C00U);
  EXPECT_EQ(to_float16(kInfinity), 0x7C00U);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()), 0x7F80U);
  EXPECT_EQ(to_bfloat16(-kInfinity), 0xFF80U);
}

TEST(HalfTest, KeepsSubnormalsAndTheSignOfZero) {
  EXPECT_EQ(to_float16(0x1p-24F), 0x0001U);
  EXPECT_EQ(to_float16(0x1.8p-25F), 0x0001U);
  EXPECT_EQ(to_float16(0x1p-25F), 0x0000U);  // a tie: zero is even
  EXPECT_EQ(to_float16(-0x1p-25F), 0x8000U);
  EXPECT_EQ(to_float16(0x1.FF8p-15F), 0x03FFU);
  EXPECT_EQ(to_float16(std::numeric_limits<float>::denorm_min()), 0x0000U);
  EXPECT_EQ(to_float16(-0.0F), 0x8000U);
  EXPECT_EQ(to_bfloat16(-0.0F), 0x8000U);
  EXPECT_EQ(to_bfloat16(0x1p-133F), 0x0001U);
}

TEST(HalfTest, KeepsNaNWhateverItsPayload) {
  for (const std::uint32_t bits :
       {0x7FC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFF800001U, 0xFFC00000U}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(from_float16(to_float16(nan)))) << bits;
    EXPECT_EQ(to_bfloat16(nan), 0x7FC0U) << bits;
  }
}

}  // namespace
}  // namespace qfilters
