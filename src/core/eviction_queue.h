#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "qfilters/selection.h"

namespace qfilters {

/// Which row of a head goes next when one new row enters a full head: a heap
/// of the rows that may go beside a ring of the recent ones. Takes the same
/// decisions as select_rows() over the rows in temporal order.
class EvictionQueue {
 public:
  /// Whether it describes its head's rows.
  [[nodiscard]] bool ready() const noexcept { return !evictable_.empty(); }

  /// To be built again before the next replace().
  void reset() noexcept { evictable_.clear(); }

  /// Takes over a head's rows, in any order: more rows than protection holds.
  /// O(n log n).
  void build(
      std::span<const std::int32_t> positions,
      std::span<const float> scores,
      const Protection& protection);

  /// A row newer than all others enters: returns the slot it takes from the
  /// row that goes, none when it is itself the one. O(log n).
  [[nodiscard]] std::optional<std::uint32_t> replace(
      float score, std::int32_t position) noexcept;

 private:
  struct Row {
    std::uint64_t key;  // order_key(score, position)
    std::uint32_t slot;
  };

  /// Puts `row` in place of the lowest.
  void replace_lowest(const Row& row) noexcept;

  std::vector<Row> evictable_;  // binary heap, lowest first
  std::vector<Row> recent_;     // ring
  std::size_t oldest_ = 0;      // in the ring
};

}  // namespace qfilters
