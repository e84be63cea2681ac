#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/attend.h"

namespace qfilters {

/// What some queries have summed up over some rows: [queries][value_dim], not
/// divided by the sum of the weights yet, and the softmax of each.
struct PartialAttention {
  float* out;
  kernels::Softmax* softmax;
};

/// Adds what was summed over later rows. The order of merges decides the bits.
/// O(queries * value_dim).
inline void merge(
    const PartialAttention& into,
    const PartialAttention& later,
    std::size_t queries,
    std::size_t value_dim) noexcept {
  for (std::size_t q = 0; q < queries; ++q) {
    kernels::Softmax& sum = into.softmax[q];
    const kernels::Softmax& more = later.softmax[q];
    if (more.sum == 0.0F) continue;
    float* const out = into.out + q * value_dim;
    const float* const from = later.out + q * value_dim;
    if (sum.sum == 0.0F) {  // not 0 + x, which loses the sign of -0
      std::copy_n(from, value_dim, out);
      sum = more;
      continue;
    }
    const float max = std::max(sum.max, more.max);
    const float keep = std::exp(sum.max - max);
    const float add = std::exp(more.max - max);
    for (std::size_t d = 0; d < value_dim; ++d)
      out[d] = out[d] * keep + from[d] * add;
    sum = {max, sum.sum * keep + more.sum * add};
  }
}

}  // namespace qfilters
