#pragma once

// Random streams for property tests: shapes, numbers and how tokens arrive.
// rapidcheck chooses (and shrinks) what is structure, seeds fill the rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#include <rapidcheck.h>

#include "qfilters/selection.h"

#include "unit/test_util.h"

namespace qfilters::test {

/// The same cases in every run, unless the caller chooses.
inline const int kSeededCases =
    setenv("RC_PARAMS", "seed=1 max_success=300", 0);

/// A number in [low, high].
inline std::size_t any_of(std::size_t low, std::size_t high) {
  return *rc::gen::inRange<std::size_t>(low, high + 1);
}

/// Overwrites rows with numbers of one kind: of few values, so that scores
/// tie; the same with NaN and infinities; or any bits at all.
inline void fill_with_any_kind(HalfTensor& rows) {
  const DType dtype = rows.view().dtype;
  constexpr std::array kFew = {-1.0F, -0.5F, -0.0F, 0.0F, 0.5F, 1.0F};
  constexpr std::array kOdd = {kNaN, kInfinity, -kInfinity};
  const std::size_t kind = any_of(0, 2);
  Random random(*rc::gen::arbitrary<std::uint64_t>());
  for (std::uint16_t& x : rows.data()) {
    if (kind == 2) {
      x = static_cast<std::uint16_t>(random.below(1U << 16));
    } else if (kind == 1 && random.below(100) == 0) {
      x = encode(dtype, kOdd[random.below(kOdd.size())]);
    } else {
      x = encode(dtype, kFew[random.below(kFew.size())]);
    }
  }
}

/// Whole numbers between -2 and 2.
inline std::vector<float> any_filter(std::size_t size) {
  Random random(*rc::gen::arbitrary<std::uint64_t>());
  std::vector<float> out(size);
  for (float& x : out) {
    x = static_cast<float>(random.below(5)) - 2.0F;
  }
  return out;
}

/// Splits `tokens` into updates; some may be empty.
inline std::vector<std::size_t> any_split(std::size_t tokens) {
  auto out = *rc::gen::container<std::vector<std::size_t>>(
      rc::gen::inRange<std::size_t>(0, 70));
  for (std::size_t& count : out) {
    count = std::min(count, tokens);
    tokens -= count;
  }
  if (tokens > 0) out.push_back(tokens);
  return out;
}

/// Rows kept, protected and let pile up; they fit each other.
struct Bounds {
  std::size_t budget = 1;
  Protection protection;
  std::size_t interval = 0;
};

inline Bounds any_bounds(std::size_t most_interval) {
  Bounds out;
  out.budget = any_of(1, 90);
  out.protection.sinks = any_of(0, std::min<std::size_t>(out.budget - 1, 6));
  out.protection.recent = any_of(0, out.budget - 1 - out.protection.sinks);
  out.interval = any_of(0, most_interval);
  return out;
}

/// Whether row `a` goes before row `b`: by score, NaN lowest, else the older.
inline bool is_worse(
    const std::vector<float>& scores, std::size_t a, std::size_t b) {
  if (std::isnan(scores[a]) || std::isnan(scores[b])) {
    return std::isnan(scores[a]) && (!std::isnan(scores[b]) || a < b);
  }
  return scores[a] < scores[b] || (scores[a] == scores[b] && a < b);
}

/// Kept positions of a stream whose tokens scored `scores` obey the rule:
/// ascending and unique, protected rows there, none worse than an evicted one.
inline void assert_best_rows(
    const std::vector<std::int32_t>& positions,
    const std::vector<float>& scores,
    const Protection& protection) {
  RC_ASSERT(
      std::adjacent_find(
          positions.begin(), positions.end(), std::greater_equal<>()) ==
      positions.end());
  std::vector<bool> kept(scores.size());
  for (const std::int32_t position : positions) {
    kept.at(static_cast<std::size_t>(position)) = true;
  }
  for (std::size_t a = 0; a < scores.size(); ++a) {
    const bool is_protected =
        a < protection.sinks || scores.size() - a <= protection.recent;
    if (is_protected) RC_ASSERT(kept[a]);
    if (is_protected || !kept[a]) continue;
    for (std::size_t b = 0; b < scores.size(); ++b) {
      if (!kept[b]) RC_ASSERT(!is_worse(scores, a, b));
    }
  }
}

}  // namespace qfilters::test
