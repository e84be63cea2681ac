#include "qfilters/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>

#include "qfilters/error.h"

namespace qfilters {

namespace {

// Maps (score, index) to one integer of the same order: NaN lowest, zeros
// equal, larger index wins a tie. All keys of a head are distinct.
std::uint64_t order_key(float score, std::size_t index) noexcept {
  std::uint32_t rank = 0;
  if (!std::isnan(score)) {
    const auto bits =
        std::bit_cast<std::uint32_t>(score == 0.0F ? 0.0F : score);
    rank = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  }
  return (std::uint64_t{rank} << 32) | index;
}

}  // namespace

std::vector<std::uint32_t> select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection) {
  const std::size_t rows = scores.size();
  const std::size_t sinks = std::min(protection.sinks, rows);
  const std::size_t recent = std::min(protection.recent, rows - sinks);
  if (keep > rows || keep < sinks + recent) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "select: keep=" + std::to_string(keep) +
            " must be between sinks+recent=" + std::to_string(sinks + recent) +
            " and rows=" + std::to_string(rows));
  }
  std::vector<std::uint32_t> kept;
  kept.reserve(keep);
  if (keep == rows) {
    kept.resize(rows);
    std::iota(kept.begin(), kept.end(), 0U);
    return kept;
  }
  const std::size_t chosen = keep - sinks - recent;
  const std::size_t end = rows - recent;
  std::vector<std::uint64_t> keys;
  keys.reserve(end - sinks);
  for (std::size_t i = sinks; i < end; ++i) {
    keys.push_back(order_key(scores[i], i));
  }
  std::vector<std::uint64_t> order = keys;
  const auto last = order.begin() + static_cast<std::ptrdiff_t>(chosen);
  std::nth_element(order.begin(), last, order.end(), std::greater<>());
  const std::uint64_t threshold = *last;  // the best row that goes

  for (std::size_t i = 0; i < sinks; ++i) {
    kept.push_back(static_cast<std::uint32_t>(i));
  }
  for (std::size_t i = sinks; i < end; ++i) {
    if (keys[i - sinks] > threshold)
      kept.push_back(static_cast<std::uint32_t>(i));
  }
  for (std::size_t i = end; i < rows; ++i) {
    kept.push_back(static_cast<std::uint32_t>(i));
  }
  return kept;
}

}  // namespace qfilters
