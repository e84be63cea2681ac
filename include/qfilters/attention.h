#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

/// How much a micro-batch's queries attend to each row: what eviction by
/// attention needs. The sum over all queries is H2O's (arXiv:2306.14048), over
/// the last ones SnapKV's (arXiv:2404.14469), over the last one TOVA's
/// (arXiv:2401.06104); the maximum is KVzip's (arXiv:2505.23416).
struct AttentionStatistics {
  enum class Kind : std::uint8_t { kSum, kMax };

  Kind kind = Kind::kSum;
  /// Queries at the end of the micro-batch that count; 0: all.
  std::size_t last_queries = 0;
  /// [group][row of the view: stored, then new], written by attend(): sum or
  /// maximum of the softmax's probabilities over the queries that count and
  /// the query heads that share the group; 0 for a row that none of them sees.
  std::vector<std::vector<float>> rows;
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
/// kBlockRows rows (online softmax, arXiv:1805.02867), whose sums are merged in
/// an order that the rows' places alone decide, so the bits depend neither on
/// the number of threads nor on how tokens are split into micro-batches.
/// Threads share heads, query blocks and, where those are few, rows.
/// Int8 rows (RowFormat::kInt8) are read as they are stored, scales applied to
/// scores and weights in float32; the new rows are still as they came, so with
/// them the split does matter.
/// O(query_heads * new_rows * rows * dim).
/// A non-finite key or value makes the outputs that see it meaningless, and no
/// others. `statistics`, if any, takes a second pass over the keys for the
/// queries that count; nothing else changes. Its bits do not depend on the
/// number of threads either. Throws Error kShape or kInvalidArgument before
/// anything is written; after std::bad_alloc `out` and `statistics` are
/// unspecified.
void attend(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    const OutputView& out,
    AttentionStatistics* statistics = nullptr);

}  // namespace qfilters
