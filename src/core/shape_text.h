#pragma once

#include <cstddef>
#include <string>

#include "qfilters/tensor_view.h"

namespace qfilters {

/// "[batch, heads, tokens, dim]" with numbers, for messages.
inline std::string shape_text(
    std::size_t batch, std::size_t heads, std::size_t tokens, std::size_t dim) {
  return "[" + std::to_string(batch) + ", " + std::to_string(heads) + ", " +
         std::to_string(tokens) + ", " + std::to_string(dim) + "]";
}

inline std::string shape_text(const TensorView& view) {
  return shape_text(view.batch, view.heads, view.tokens, view.dim);
}

}  // namespace qfilters
