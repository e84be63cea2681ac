#pragma once

#include <optional>
#include <span>

namespace qfilters::eval {

/// Spearman's rank correlation: the correlation of the ranks, where equal
/// values share the mean of theirs; -1 to 1. None where it says nothing:
/// fewer than two values, all values of a side the same, or one not a number.
/// Throws Error kInvalidArgument for sides of different lengths.
/// O(n log n).
[[nodiscard]] std::optional<double> rank_correlation(
    std::span<const float> a, std::span<const float> b);

}  // namespace qfilters::eval
