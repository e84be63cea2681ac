#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace qfilters {

/// Most batch elements, heads, dimensions, and (batch, head) groups. Nobody
/// has as many; it keeps wrong sizes from turning into small ones in products.
inline constexpr std::size_t kMostSize = std::size_t{1} << 20;

/// Most tokens of a sequence: positions are int32.
inline constexpr std::size_t kMostTokens =
    std::numeric_limits<std::int32_t>::max();

/// Most threads of a call. OpenMP ends the process when it cannot start one.
inline constexpr int kMostThreads = 512;

/// Whether `size` is in 1..kMostSize.
[[nodiscard]] constexpr bool is_size(std::size_t size) noexcept {
  return size >= 1 && size <= kMostSize;
}

}  // namespace qfilters
