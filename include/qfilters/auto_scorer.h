#pragma once

#include <cstddef>
#include <memory>

#include "qfilters/filter_bank.h"
#include "qfilters/key_regression.h"
#include "qfilters/scoring.h"

namespace qfilters {

/// Values that filters of policy auto have for each KV head: the coefficients
/// of two quadratic scores, facts and then fluency, as KeyRegression fits them.
[[nodiscard]] constexpr std::size_t auto_size(std::size_t key_dim) noexcept {
  return 2 * quadratic_size(key_dim);
}

/// Ours: a row stays for the facts it may hold or for fluency, sooner if for
/// both: (facts + fluency + sqrt((facts - fluency)^2 + 49)) / 2, a smooth
/// maximum. Facts: a quadratic score fitted to how much attention a key gets
/// when the model reads its context again (the score of KVzip,
/// arXiv:2505.23416, predicted from the key alone as KVzap, arXiv:2601.07891,
/// predicts it from hidden states). Where it hardly tells the keys of a head
/// apart, so that its standard deviation s over the rows held is below 1.2, it
/// gains 1.75 * sqrt(1.2^2 - s^2) times how many standard deviations the key
/// differs from the head's others (key_differences()). A row next to another
/// has at least what that one has, less 1. Fluency: a quadratic score fitted to
/// how much attention is to come. A key that is not finite makes NaN, which
/// goes first. Comparable across heads and layers, made for
/// BudgetRule::kShared. O(key_dim) for each row a head holds whenever rows are
/// chosen. Filters: [kv_heads, auto_size(key_dim)] a layer. Throws Error
/// kInvalidArgument for no filters.
[[nodiscard]] std::shared_ptr<const Scorer> make_auto_scorer(
    std::shared_ptr<const FilterBank> filters);

}  // namespace qfilters
