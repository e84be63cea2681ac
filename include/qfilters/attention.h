#pragma once

#include <cstddef>

#include "qfilters/rows_view.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

struct AttentionOptions {
  float scale = 0;     ///< applied to q . k; 0 means 1 / sqrt(dim)
  float soft_cap = 0;  ///< s -> cap * tanh(s / cap); 0 means off
  /// Query q sees keys k with q - k < window; 0: all. Needs rows in temporal
  /// order.
  std::size_t window = 0;
  int threads = 1;  ///< 1..kMostThreads; never changes a bit of the result
};

/// Scaled dot-product attention of the new queries over stored and new rows.
///
/// queries: float32 [batch, query_heads, new_rows, key_dim]; query i is at
/// position rows.first_position() + i and sees all stored rows and the new
/// rows 0..i. query_heads is a multiple of kv_heads (grouped-query attention:
/// consecutive query heads share a KV head). out: float32 [batch, query_heads,
/// new_rows, value_dim]. A query that sees no row gives zeros.
///
/// Scores, softmax and sums are float32, tile by tile over fixed blocks of
/// kBlockRows rows (online softmax, arXiv:1805.02867), so the bits depend
/// neither on the number of threads nor on how tokens are split into
/// micro-batches. O(query_heads * new_rows * rows * dim).
/// A non-finite key or value makes the outputs that see it meaningless, and no
/// others. Throws Error kShape or kInvalidArgument before anything is written;
/// after std::bad_alloc `out` is unspecified.
void attend(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    const OutputView& out);

}  // namespace qfilters
