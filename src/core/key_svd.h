#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "qfilters/scoring.h"

namespace qfilters {

/// The key-SVD fallback's direction for one head: the top eigenvector of the
/// mean-centred covariance of `keys` [rows, dim], a unit vector whose largest
/// component by magnitude is positive (the first one on ties). One row, or
/// rows that are all the same, give the last unit vector. A non-finite key
/// gives a vector of NaN: nothing can be said about such rows.
/// O(rows * dim^2 + dim^3).
std::vector<float> key_direction(
    std::span<const float> keys, std::size_t rows, std::size_t dim);

/// Projection on a filter of its own for each (batch, head):
/// directions [batch * kv_heads, dim], times sign.
std::shared_ptr<const Scorer> make_group_scorer(
    std::vector<float> directions, int sign);

}  // namespace qfilters
