#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/filter_bank.h"
#include "qfilters/rows_view.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// Projection of keys on one filter, the canonical Q-Filters score: float32,
/// 16 partial sums (sum j takes dimensions j, j+16, ... in order, multiply
/// then add, never fused), added pairwise by halves, times `sign`. The bits
/// are the same on every ISA and for every batch shape.
/// `keys` is one head [tokens, dim] of 16-bit rows: `head` of `batch` in the
/// view. out[i] belongs to token i. O(tokens * dim).
/// Throws Error kShape when filter or out do not fit the view.
void score_projection(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<const float> filter,
    float sign,
    std::span<float> out);

/// A quadratic score: sum over d of (linear_d + square_d * k_d) * k_d, in the
/// canonical order above, plus norm * |k| plus offset. `coefficients` are
/// linear, square [dim each], norm, offset, as KeyRegression fits them. Throws
/// Error kShape when they or out do not fit the view. O(tokens * dim).
void score_quadratic(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<const float> coefficients,
    std::span<float> out);

/// The same of all rows of a head, stored rows first: the same bits, several
/// times as fast as row by row. O(rows * key_dim).
void score_quadratic(
    const RowsView& rows,
    std::size_t group,
    std::span<const float> coefficients,
    std::span<float> out);

/// Euclidean norm of keys, squares summed in the canonical order above.
void key_norms(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<float> out);

/// All keys of a head, stored rows first, as float32 [rows, key_dim]. Throws
/// Error kShape unless `out` has that size. O(rows * key_dim).
void read_keys(const RowsView& rows, std::size_t group, std::span<float> out);

/// The same as blocks hold them, [tiles][key_dim][kBlockRows]: row r is slot
/// r % kBlockRows of tile r / kBlockRows; slots behind the last row are 0.
/// Several times as fast as read_keys(), and sums along rows need no
/// horizontal step. Throws Error kShape unless `out` has
/// key_tile_floats(rows, group) values. O(rows * key_dim).
void read_key_tiles(
    const RowsView& rows, std::size_t group, std::span<float> out);

[[nodiscard]] std::size_t key_tile_floats(
    const RowsView& rows, std::size_t group) noexcept;

/// All values of a head, stored rows first, as float32 [rows, value_dim].
/// Throws Error kShape unless `out` has that size. O(rows * value_dim).
void read_values(const RowsView& rows, std::size_t group, std::span<float> out);

/// The key-SVD fallback's direction for one head: the top eigenvector of the
/// mean-centred covariance of `keys` [rows, dim], a unit vector whose largest
/// component by magnitude is positive (the first one on ties). One row, or
/// rows that are all the same, give the last unit vector. A non-finite key
/// gives a vector of NaN: nothing can be said about such rows.
/// O(rows * dim^2 + dim^3).
[[nodiscard]] std::vector<float> key_direction(
    std::span<const float> keys, std::size_t rows, std::size_t dim);

/// The rows a scorer sees when they enter the cache: one KV head.
struct ScoreInput {
  std::size_t layer = 0;
  std::size_t batch = 0;
  std::size_t kv_head = 0;
  TensorView keys;                  ///< the new rows, 16-bit
  std::int32_t first_position = 0;  ///< position of token 0 of `keys`
};

/// A head of which rows must go: all it holds, stored and new.
struct RescoreInput {
  std::size_t layer = 0;
  std::size_t batch = 0;
  std::size_t kv_head = 0;
  const RowsView& rows;

  [[nodiscard]] std::size_t group() const noexcept {
    return batch * rows.shape().kv_heads + kv_head;
  }
};

/// Which AttentionStatistics of a micro-batch a scorer looks at.
struct AttentionNeeds {
  AttentionStatistics::Kind kind = AttentionStatistics::Kind::kSum;
  std::size_t last_queries = 0;  ///< at the end of the micro-batch; 0: all

  friend bool operator==(const AttentionNeeds&, const AttentionNeeds&) =
      default;
};

/// One head, and how much the open micro-batch attends to its rows.
struct ObserveInput {
  std::size_t layer = 0;
  std::size_t batch = 0;
  std::size_t kv_head = 0;
  const RowsView& rows;
  /// [group][row of the view] of the whole layer, of the kind asked for.
  const std::vector<std::vector<float>>& attention;

  [[nodiscard]] std::size_t group() const noexcept {
    return batch * rows.shape().kv_heads + kv_head;
  }
};

/// Gives each new row one score; larger = keep. It stays with the row; a
/// scorer that looks at attention updates it with every micro-batch. Immutable
/// and thread safe.
class Scorer {
 public:
  Scorer() = default;
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;
  virtual ~Scorer() = default;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Tells scorers of one name apart that score differently (their filters or
  /// seed, say): what a snapshot is checked against.
  [[nodiscard]] virtual std::string identity() const {
    return std::string(name());
  }

  /// Throws Error kMismatch if layer `layer` of a model with these heads and
  /// key dimension cannot be scored (a filter of another model, say).
  virtual void check_layer(
      std::size_t layer, std::size_t kv_heads, std::size_t key_dim) const;

  /// Writes one score per token of in.keys.
  virtual void score(const ScoreInput& in, std::span<float> out) const = 0;

  /// What it must see of each micro-batch's attention, if anything. attend()
  /// then reads the keys of the queries that count twice.
  [[nodiscard]] virtual std::optional<AttentionNeeds> attention()
      const noexcept {
    return std::nullopt;
  }

  /// With attention() only: called for each head of a micro-batch with the
  /// scores of the view's rows, stored and new; updates them. Where the past
  /// was not seen (the policy is new) scores are those of score().
  virtual void observe(const ObserveInput& in, std::span<float> scores) const;

  /// With attention() only: its scores come from a second reading of the
  /// tokens. A commit then shows it nothing and evicts nothing; whoever drives
  /// the cache reads the tokens again (Pass::kRehearse), which is what it
  /// observes, and evicts (SequenceCache::evict()).
  [[nodiscard]] virtual bool rehearses() const noexcept { return false; }

  /// Whether a row's score is that of its entry whatever else is there.
  [[nodiscard]] virtual bool frozen() const noexcept {
    return !attention().has_value();
  }

  /// Not frozen: called before rows of a head are chosen, with their scores in
  /// the order of the view; writes the scores to choose by. The rows keep those
  /// they had.
  virtual void rescore(const RescoreInput& in, std::span<float> scores) const;
};

/// What `scorer` gives all rows of a head, stored and new ones, as if they
/// entered now, int8 ones as they read back. Throws Error kShape unless `out`
/// has one score a row. O(rows * key_dim), and what the scorer takes.
void score_rows(
    const Scorer& scorer, const RescoreInput& in, std::span<float> out);

/// Q-Filters (arXiv:2503.02812): sign * key . filter[layer][head].
/// Throws Error kInvalidArgument unless sign is +1 or -1.
[[nodiscard]] std::shared_ptr<const Scorer> make_qfilters_scorer(
    std::shared_ptr<const FilterBank> filters, int sign = 1);

/// StreamingLLM (arXiv:2309.17453): the newest rows stay; score = position.
/// `name` is the scorer's: a literal.
[[nodiscard]] std::shared_ptr<const Scorer> make_streaming_scorer(
    std::string_view name = "streaming");

/// L2Norm (arXiv:2406.11430): keys of small norm attract attention;
/// score = -|key|.
[[nodiscard]] std::shared_ptr<const Scorer> make_knorm_scorer();

/// A uniform number from (seed, layer, batch, head, position) only, so that
/// chunking and threads do not change it. The baseline any policy must beat.
[[nodiscard]] std::shared_ptr<const Scorer> make_random_scorer(
    std::uint64_t seed = 0);

}  // namespace qfilters
