#pragma once

#include <cstddef>

#include "qfilters/filter_bank.h"

namespace qfilters {

/// Throws Error kMismatch, naming the scorer, unless a layer's filters are
/// [heads, dim].
void check_bank(
    const char* name,
    const FilterBank& filters,
    std::size_t layer,
    std::size_t heads,
    std::size_t dim);

/// Throws Error kInvalidArgument for no filters.
void check_given(const char* name, const FilterBank* filters);

}  // namespace qfilters
