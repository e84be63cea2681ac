#pragma once

#include <cstddef>
#include <span>

#include "qfilters/rows_view.h"

namespace qfilters {

/// KeyDiff's score (arXiv:2504.15364) of all rows of a head, stored rows first:
/// minus the cosine of each key with the mean of the head's unit keys; 0 for a
/// key of zeros. A key whose squares have no finite sum in float32 gets NaN and
/// is not part of the mean. Sums add in one order on every ISA. Throws Error
/// kShape unless `out` has one value a row. O(rows * key_dim).
void key_differences(
    const RowsView& rows, std::size_t group, std::span<float> out);

}  // namespace qfilters
