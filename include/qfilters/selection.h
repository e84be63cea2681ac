#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace qfilters {

/// Rows that are never evicted, whatever their score.
struct Protection {
  std::size_t sinks = 4;   ///< the first rows of a sequence
  std::size_t recent = 0;  ///< the last rows at the time of eviction

  friend bool operator==(const Protection&, const Protection&) = default;
};

/// Which `keep` of `scores.size()` rows stay: indices, ascending and unique.
///
/// Protected rows always stay. The others follow the total order (score,
/// then index): larger scores first, equal scores (-0.0 == +0.0) prefer the
/// newer row, NaN ranks below every number. Deterministic on every machine.
/// Expected O(n). Throws Error kInvalidArgument when keep > n or when keep
/// is smaller than the number of protected rows.
[[nodiscard]] std::vector<std::uint32_t> select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection);

/// The same into `kept`: allocates nothing once this thread has selected from
/// as many rows and `kept` is large enough.
void select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection,
    std::vector<std::uint32_t>& kept);

/// One of the heads that share a budget.
struct SharingHead {
  std::span<const float> scores;
  std::vector<std::uint32_t>* kept = nullptr;  ///< receives its rows
};

/// Which `keep` of all rows of several heads stay. In each head protected rows
/// always stay, and the best rows up to `least` in all (or all it has). The
/// rest of `keep` goes to the best rows anywhere, in the order above, where of
/// rows with equal score and index the first head's is preferred. Expected
/// O(rows of all heads). Throws Error kInvalidArgument when keep exceeds the
/// number of rows or is smaller than what must stay.
void select_shared(
    std::span<const SharingHead> heads,
    std::size_t keep,
    std::size_t least,
    const Protection& protection);

}  // namespace qfilters
