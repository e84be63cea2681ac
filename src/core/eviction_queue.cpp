#include "core/eviction_queue.h"

#include <algorithm>
#include <utility>

#include "core/order_key.h"

namespace qfilters {

void EvictionQueue::build(
    std::span<const std::int32_t> positions,
    std::span<const float> scores,
    const Protection& protection) {
  std::vector<std::uint32_t> slots(positions.size());
  for (std::uint32_t i = 0; i < slots.size(); ++i)
    slots[i] = i;
  std::sort(slots.begin(), slots.end(), [&](auto a, auto b) {
    return positions[a] < positions[b];
  });
  std::vector<Row> rows;
  rows.reserve(slots.size());
  for (const std::uint32_t slot : slots) {
    const auto age = static_cast<std::uint32_t>(positions[slot]);
    rows.push_back({order_key(scores[slot], age), slot});
  }
  const auto first =
      rows.begin() + static_cast<std::ptrdiff_t>(protection.sinks);
  const auto last = rows.end() - static_cast<std::ptrdiff_t>(protection.recent);
  recent_.assign(last, rows.end());
  oldest_ = 0;
  std::make_heap(
      first, last, [](const Row& a, const Row& b) { return a.key > b.key; });
  evictable_.assign(first, last);
}

void EvictionQueue::replace_lowest(const Row& row) noexcept {
  const std::size_t count = evictable_.size();
  std::size_t at = 0;
  for (std::size_t child = 1; child < count; child = 2 * at + 1) {
    const bool right =
        child + 1 < count && evictable_[child + 1].key < evictable_[child].key;
    child += right ? 1 : 0;
    if (row.key < evictable_[child].key) break;
    evictable_[at] = evictable_[child];
    at = child;
  }
  evictable_[at] = row;
}

std::optional<std::uint32_t> EvictionQueue::replace(
    float score, std::int32_t position) noexcept {
  const Row entering{order_key(score, static_cast<std::uint32_t>(position)), 0};
  const bool window = !recent_.empty();
  // The row that may go from now on: one leaves the recent rows for each that
  // enters them.
  Row candidate = window ? recent_[oldest_] : entering;
  const Row lowest = evictable_.front();
  const bool stays = lowest.key < candidate.key;
  if (!stays && !window) return std::nullopt;
  const std::uint32_t slot = stays ? lowest.slot : candidate.slot;
  if (!window) candidate.slot = slot;
  if (stays) replace_lowest(candidate);
  if (window) {
    recent_[oldest_] = {entering.key, slot};
    oldest_ = (oldest_ + 1) % recent_.size();
  }
  return slot;
}

}  // namespace qfilters
