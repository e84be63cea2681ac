#pragma once

// START HERE: QFiltersKVCache is the whole system for one attention layer.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/config.h"
#include "qfilters/filter_bank.h"
#include "qfilters/rows_view.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/snapshot.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

/// An attention mask for the tokens of the coming update.
struct AttentionMask {
  enum class Kind {
    kNone,    ///< nothing to mask
    kCausal,  ///< plain causal, no array needed
    kArray,   ///< see `allowed`
  };
  Kind kind = Kind::kNone;
  std::size_t batch = 0;
  std::size_t queries = 0;
  std::size_t keys = 0;
  /// kArray: [batch, 1, queries, keys] row-major, 1 = may attend.
  std::vector<std::uint8_t> allowed;
};

/// What an update does with its new rows until they are stored or evicted.
enum class Inputs : std::uint8_t {
  kCopied,    ///< the caller's memory is free when the update returns
  kBorrowed,  ///< it must stay as it is; see update_and_fetch()
};

/// What one (batch, head) holds: a copy, for diagnosis.
struct QFiltersState {
  std::vector<std::uint16_t> keys;      ///< [rows, key_dim], the cache's dtype
  std::vector<std::uint16_t> values;    ///< [rows, value_dim]
  std::vector<float> scores;            ///< [rows], sign included
  std::vector<std::int32_t> positions;  ///< [rows]
  std::vector<float> filter_dir;        ///< [key_dim]; empty until it is frozen
};

/// The KV cache of one attention layer with Q-Filters eviction
/// (arXiv:2503.02812): each key is scored once by its projection on its head's
/// frozen filter, and what does not fit the budget is evicted after each
/// update. Survivors keep their true positions; nothing is rotated again.
///
/// Without calibrated filters it falls back to the key-SVD direction: nothing
/// is evicted until an update brings the rows to qfilters_calib_tokens; then
/// each head's filter is the main axis of its mean-centred keys, frozen for
/// good. That finds the axis but not which end of it matters (qfilters_sign
/// turns it around), and the result depends on which update crosses the
/// threshold. Prefer filters from `qfilters calibrate`.
///
///   QFiltersKVCache cache(config, filters);
///   RowsView rows = cache.update_and_fetch(keys, values);
///   attend(queries, rows, {}, out);
///
/// With calibrated filters and interval 0 the kept rows do not depend on how
/// tokens are split into updates. Not thread safe; distinct caches are
/// independent.
class QFiltersKVCache {
 public:
  /// `filters` [kv_heads, key_dim] of this layer; see load_filters(). Throws
  /// Error as validate() does, kShape or kInvalidArgument for filters whose
  /// size is not heads * dim or that are not finite.
  QFiltersKVCache(const Config& config, LayerFilters filters);

  /// The key-SVD fallback; KV heads and dims come with the first update.
  explicit QFiltersKVCache(const Config& config);

  ~QFiltersKVCache();
  QFiltersKVCache(QFiltersKVCache&&) noexcept;
  QFiltersKVCache& operator=(QFiltersKVCache&&) noexcept;

  /// Takes new rows [batch, kv_heads, tokens, dim] (float32, float16 or
  /// bfloat16; stored as bfloat16 when the first keys and values both are,
  /// else as float16, rounded to nearest even) and returns all prior kept
  /// rows plus all new rows. Only the state for the next update is evicted.
  ///
  /// The view is valid until the next update or a call that settles. Rows
  /// that are kBorrowed must stay valid and unchanged as long: those of the
  /// storage type are then read where they are, which makes a long prefill
  /// many times as fast as copying rows of which few are kept.
  ///
  /// Throws Error kShape, kMismatch or kInvalidArgument (sizes beyond
  /// limits.h, positions that exceed int32) before anything changes;
  /// kLowRetention (policy "raise") after the update is complete;
  /// std::bad_alloc with the last update settled and nothing else changed.
  /// O(batch * kv_heads * (tokens * dim + rows)).
  RowsView update_and_fetch(
      const TensorView& keys,
      const TensorView& values,
      Inputs inputs = Inputs::kCopied);

  /// Applies the last update's eviction now and frees its staging memory;
  /// otherwise the next update does. Invalidates the returned view.
  ///
  /// positions(), scores(), states(), stored(), save() and a make_mask() that
  /// makes an array settle too, once their arguments are found to be fine: a
  /// call that throws an Error has settled nothing.
  void settle();

  /// True position of the next token: tokens ever seen, not rows kept.
  [[nodiscard]] std::size_t offset() const noexcept;

  /// Same as offset().
  [[nodiscard]] std::size_t size() const noexcept { return offset(); }

  [[nodiscard]] bool empty() const noexcept;

  /// Original positions of the stored rows of a group (batch * kv_heads +
  /// head), ascending. Settles. Throws kInvalidArgument out of range.
  [[nodiscard]] std::vector<std::int32_t> positions(std::size_t group = 0);
  /// Scores of the stored rows of a group, sign included. Settles. Throws
  /// kInvalidArgument out of range.
  [[nodiscard]] std::vector<float> scores(std::size_t group = 0);
  /// One state per (batch, head); empty before the first update. Settles.
  [[nodiscard]] std::vector<QFiltersState> states();
  /// The stored rows without new ones. Settles. Throws kInvalidArgument
  /// before the first update.
  [[nodiscard]] RowsView stored();
  /// The filter of a group, [key_dim]; empty until it is frozen. Valid until
  /// the next update or restore(). Throws kInvalidArgument out of range.
  [[nodiscard]] std::span<const float> filter(std::size_t group = 0) const;

  /// Mask for `tokens` coming tokens over the stored rows and themselves;
  /// `window` 0 means none. kNone for one token without a window. Before the
  /// first update kCausal, unless `return_array` or a window asks for an
  /// array; after it always an array. Settles when it makes an array. Throws
  /// Error kInvalidArgument when positions would exceed int32, std::bad_alloc
  /// at once for an array that no memory holds; nothing is settled then.
  [[nodiscard]] AttentionMask make_mask(
      std::size_t tokens, bool return_array = false, std::size_t window = 0);

  /// 16-bit bytes of the rows kept, all heads, plus the float32 filters once
  /// they exist.
  [[nodiscard]] std::uint64_t qfilters_kept_bytes() const noexcept;
  /// Bytes if every row had been kept.
  [[nodiscard]] std::uint64_t full_seq_bytes() const noexcept;
  /// full_seq_bytes / qfilters_kept_bytes; 1 before the first update.
  [[nodiscard]] double compression_ratio() const noexcept;
  /// Token positions ever passed, summed over batch and heads.
  [[nodiscard]] std::uint64_t tokens_seen() const noexcept;
  /// Rows stored for group 0.
  [[nodiscard]] std::size_t tokens_kept() const noexcept;
  /// Bytes of stored keys and values.
  [[nodiscard]] std::uint64_t nbytes() const noexcept;
  /// Scores that were NaN or infinite; such rows are evicted first (NaN).
  [[nodiscard]] std::uint64_t non_finite_scores() const noexcept;

  /// Everything a later process needs to continue bit for bit, filters of the
  /// fallback included (calibrated ones by fingerprint). Settles.
  [[nodiscard]] Snapshot save();
  /// Continues a saved cache in one with the same config and filters; the last
  /// update's view is invalid then. Holds old and new rows at the same time.
  /// Throws Error kMismatch naming what differs, kFile for damaged data; the
  /// cache is as before then, that view included.
  void restore(const Snapshot& saved);

  /// Always false: evicted rows cannot come back.
  [[nodiscard]] static constexpr bool is_trimmable() noexcept { return false; }

  /// Throws Error kUnsupported.
  [[noreturn]] void trim(std::size_t tokens);

  [[nodiscard]] const Config& config() const noexcept;

  /// Where warnings go ("warn" on low retention); by default nowhere.
  void on_warning(std::function<void(std::string_view)> handler);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace qfilters
