#include "qfilters/selection.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "qfilters/error.h"

#include "core/order_key.h"

namespace qfilters {

std::vector<std::uint32_t> select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection) {
  std::vector<std::uint32_t> kept;
  select_rows(scores, keep, protection, kept);
  return kept;
}

void select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection,
    std::vector<std::uint32_t>& kept) {
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
  kept.resize(keep);
  if (keep == rows) {
    std::iota(kept.begin(), kept.end(), 0U);
    return;
  }
  const std::size_t chosen = keep - sinks - recent;
  const std::size_t end = rows - recent;
  // Keys in the order of rows, then the same again to be put in order.
  thread_local std::vector<std::uint64_t> memory;
  const std::size_t candidates = end - sinks;
  memory.resize(2 * candidates);
  std::uint64_t* const keys = memory.data();
  std::uint64_t* const order = keys + candidates;
  for (std::size_t i = 0; i < candidates; ++i) {
    keys[i] = order_key(scores[sinks + i], static_cast<std::uint32_t>(sinks + i));
  }
  std::copy_n(keys, candidates, order);
  std::nth_element(order, order + chosen, order + candidates, std::greater<>());
  const std::uint64_t threshold = order[chosen];  // the best row that goes

  std::iota(
      kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(sinks), 0U);
  std::size_t next = sinks;
  for (std::size_t i = sinks; i < end; ++i) {
    if (keys[i - sinks] > threshold) {
      kept[next++] = static_cast<std::uint32_t>(i);
    }
  }
  std::iota(
      kept.begin() + static_cast<std::ptrdiff_t>(next),
      kept.end(),
      static_cast<std::uint32_t>(end));
}

}  // namespace qfilters
