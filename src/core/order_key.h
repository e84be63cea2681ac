#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace qfilters {

/// Maps (score, age) to one integer of the order in which rows are kept: the
/// larger stays. NaN ranks lowest, zeros are equal, of equal scores the larger
/// `age` (row index or position) wins. Distinct ages give distinct keys.
[[nodiscard]] inline std::uint64_t order_key(
    float score, std::uint32_t age) noexcept {
  std::uint32_t rank = 0;
  if (!std::isnan(score)) {
    const auto bits =
        std::bit_cast<std::uint32_t>(score == 0.0F ? 0.0F : score);
    rank = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  }
  return (std::uint64_t{rank} << 32) | age;
}

}  // namespace qfilters
