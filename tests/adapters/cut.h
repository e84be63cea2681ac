#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/selection.h"
#include "qfilters/sequence_cache.h"

#include "adapters/plain_attention.h"

namespace qfilters::llama::testing {

/// Positions of the rows of a head, in temporal order.
inline std::vector<std::size_t> positions_of(
    const SequenceCache& cache, std::size_t layer, std::size_t head) {
  const auto positions = cache.store(layer).positions(head);
  return {positions.begin(), positions.end()};
}

/// How rows that compete for a budget were cut, by what each is worth.
class Cut {
 public:
  /// A head that held rows at positions `before` and now at `after`; `worth` is
  /// by position.
  void add(
      const std::vector<std::size_t>& before,
      const std::vector<std::size_t>& after,
      const Row& worth,
      const Protection& protection) {
    kept_ += after.size();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const std::size_t p = before[i];
      const bool stays = std::ranges::binary_search(after, p);
      if (i < protection.sinks || i + protection.recent >= before.size()) {
        EXPECT_TRUE(stays) << p;
      } else if (stays) {
        least_kept_ = std::min(least_kept_, worth[p]);
      } else {
        most_dropped_ = std::max(most_dropped_, worth[p]);
      }
    }
  }

  /// The best `rows` rows are those that stay. `rounding`: by how much, in
  /// relation, worth may differ from what the cache chose by.
  void expect_best(std::size_t rows, double rounding) const {
    EXPECT_EQ(kept_, rows);
    EXPECT_GE(least_kept_, most_dropped_ - rounding * std::abs(most_dropped_));
  }

 private:
  std::size_t kept_ = 0;
  double least_kept_ = std::numeric_limits<double>::infinity();
  double most_dropped_ = -std::numeric_limits<double>::max();
};

}  // namespace qfilters::llama::testing
