#pragma once

#include <bit>
#include <cstdint>

#include "qfilters/tensor_view.h"

#include "kernels/types.h"

namespace qfilters {

/// float32 to float16, round to nearest even, subnormals included; too large
/// becomes infinity, NaN stays a quiet NaN.
inline std::uint16_t to_float16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // 65520 and above round to infinity
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal
    const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    half = (rounded - 0x38000000U) >> 13;
  } else if (magnitude > 0x33000000U) {  // subnormal
    const std::uint32_t shift = 126U - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
    const std::uint32_t rest = mantissa & ((1U << shift) - 1U);
    const std::uint32_t middle = 1U << (shift - 1U);
    half = mantissa >> shift;
    if (rest > middle || (rest == middle && (half & 1U) != 0U)) ++half;
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// float32 to bfloat16, round to nearest even; every NaN becomes 0x7FC0.
inline std::uint16_t to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FC0U;
  return static_cast<std::uint16_t>(
      (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline float from_bfloat16(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

inline float from_float16(std::uint16_t value) noexcept {
  const std::uint32_t sign = (value & 0x8000U) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1FU;
  const std::uint32_t mantissa = value & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t high =
      exponent == 0x1FU ? 0x7F800000U : (exponent + 112U) << 23;
  return std::bit_cast<float>(sign | high | (mantissa << 13));
}

/// `dtype` is one of the 16-bit types from here on.
inline std::uint16_t to_half(DType dtype, float value) noexcept {
  return dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
}

inline float from_half(DType dtype, std::uint16_t value) noexcept {
  return dtype == DType::kFloat16 ? from_float16(value) : from_bfloat16(value);
}

inline kernels::Half half_of(DType dtype) noexcept {
  return dtype == DType::kFloat16 ? kernels::Half::kFloat16
                                  : kernels::Half::kBFloat16;
}

}  // namespace qfilters
