#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/kv_store.h"
#include "qfilters/policy.h"
#include "qfilters/row_pool.h"
#include "qfilters/rows_view.h"
#include "qfilters/snapshot.h"
#include "qfilters/tensor_view.h"

namespace qfilters {

class ByteReader;

/// One attention layer of a model.
struct LayerShape {
  std::size_t kv_heads = 0;
  std::size_t key_dim = 0;
  std::size_t value_dim = 0;
  /// 0: global attention, the policy's budget applies. Otherwise a sliding
  /// window: query q sees keys k with q - k < window; the layer keeps those
  /// rows outside the budget and is never evicted by score.
  std::size_t window = 0;

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

/// How the rows of a head that is held within a budget lie in the store. Which
/// rows are kept does not depend on it, but for rounding after set_policy().
enum class RowOrder {
  kTemporal,  ///< positions ascend; evicting moves the rows behind
  /// A single new row takes the slot of the row that goes: O(dim + log rows) a
  /// head and step where the policy has interval 0. Attention then adds up its
  /// rows in another order, which rounds otherwise.
  kSlot,
};

struct SequenceOptions {
  std::size_t batch = 1;
  DType dtype = DType::kFloat16;  ///< of new rows: kFloat16 or kBFloat16
  std::size_t byte_limit = 0;     ///< of all blocks; 0 = none
  int threads = 1;                ///< 1..kMostThreads; never changes a result
  RowOrder order = RowOrder::kTemporal;
  RowFormat format = RowFormat::kSame;  ///< how commit() stores rows
};

/// Counters of a sequence; bytes count keys and values, as they are stored and
/// with the scales of int8 rows, in whole blocks.
struct SequenceStats {
  std::size_t tokens = 0;    ///< tokens committed (= offset)
  std::size_t rows_min = 0;  ///< stored rows of global heads
  std::size_t rows_max = 0;
  double rows_mean = 0;
  std::size_t kv_bytes = 0;
  std::size_t kv_bytes_peak = 0;
  std::size_t kv_bytes_full = 0;  ///< if every row were kept, without rounding
  std::uint64_t evictions = 0;    ///< commits that evicted
  std::uint64_t rows_evicted = 0;
  std::uint64_t non_finite_scores = 0;
};

/// What a micro-batch is for.
enum class Pass {
  kRead,  ///< its tokens are the next ones of the sequence
  /// A second reading of tokens that were read before, for a policy that
  /// rehearses: it stands behind the sequence and does not become part of it.
  kRehearse,
};

/// The KV cache of one sequence over all attention layers of a model, held
/// within a policy's budget. Use per micro-batch:
///
///   cache.begin(tokens);
///   for each layer: cache.append(l, keys, values);
///                   attend(queries, cache.rows(l), ..., &statistics);
///                   cache.observe(l, statistics);  // if attention_needs(l)
///   cache.commit();            // or rollback(): as if it had not happened
///
/// New rows are borrowed until commit() or rollback(): rows that only pass
/// through are never copied. Attention sees every stored row and every new
/// row; only what commit() stores is cut down to the budget.
///
/// With RowFormat::kInt8 attention sees new rows as they came and stored rows
/// rounded, so its results depend on how tokens are split into micro-batches.
/// Rows are scored as they came, so what a frozen scorer keeps, with interval
/// 0, does not.
class SequenceCache {
 public:
  /// Throws Error kInvalidArgument for no layers, a size of zero or beyond
  /// limits.h, a bad dtype or row format, kMismatch when the policy cannot
  /// score these layers or has budgets for another number of them.
  SequenceCache(
      std::vector<LayerShape> layers,
      Policy policy,
      const SequenceOptions& options = {});
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;
  ~SequenceCache();

  /// Opens a micro-batch. Throws Error kInvalidArgument when one is open,
  /// positions would exceed int32, or to rehearse for a policy that does not.
  void begin(std::size_t tokens, Pass pass = Pass::kRead);

  /// Gives layer `layer` its new rows [batch, kv_heads, tokens, dim] in the
  /// cache's dtype; scores them. The data must stay valid until commit() or
  /// rollback(). Throws Error kShape naming both shapes, kInvalidArgument when
  /// nothing is open or the layer has its rows already.
  void append(
      std::size_t layer, const TensorView& keys, const TensorView& values);

  /// The statistics of attention that the policy must see of this layer; none
  /// for most policies, for windowed layers, and outside the second reading
  /// where the policy rehearses. Throws Error kInvalidArgument for a layer that
  /// does not exist.
  [[nodiscard]] std::optional<AttentionNeeds> attention_needs(
      std::size_t layer) const;

  /// Tells the policy's scorer how the open micro-batch attends to rows(layer):
  /// after append(), once. Scores of stored rows change at commit() only.
  /// Throws Error kInvalidArgument when nothing is open, the layer has no rows
  /// yet, was observed already, or needs nothing, or for another kind of
  /// statistics than it needs; kShape for other rows than rows(layer) has.
  /// Nothing changes then. O(rows) and what the scorer adds.
  void observe(std::size_t layer, const AttentionStatistics& statistics);

  /// Stored rows, and the new ones once they are appended.
  [[nodiscard]] RowsView rows(std::size_t layer) const;

  /// Stores the micro-batch and evicts down to the budget. All layers or
  /// none: throws Error kInvalidArgument when a layer has no rows yet or was
  /// not observed though the policy needs it or its merger names rows it may
  /// not, kMemoryLimit or std::bad_alloc without memory; the micro-batch is
  /// still open then and nothing has changed. A policy that rehearses evicts in
  /// evict() alone. Of a second reading the stored rows keep the scores that
  /// were observed; its own rows go, the offset stays.
  void commit();

  /// Whether rows exceed the budget by the interval: what a commit does not
  /// leave behind, unless the policy rehearses or was changed since. O(heads).
  [[nodiscard]] bool eviction_due() const noexcept;

  /// Evicts down to the budget between micro-batches, whatever the interval;
  /// all layers or none. Throws Error kInvalidArgument while a micro-batch is
  /// open, and where the policy rehearses and rows came in since the last
  /// second reading, or of a merger as commit(); std::bad_alloc. Nothing has
  /// changed then.
  void evict();

  /// Tokens since the last evict(), or since the policy was set: those that a
  /// policy that rehearses must see again before the next one. 0 for others.
  [[nodiscard]] std::size_t unrehearsed() const noexcept {
    return policy_.rehearses() ? offset_ - rehearsed_ : 0;
  }

  /// Forgets the open micro-batch; without one it does nothing.
  void rollback() noexcept;

  /// Changes the policy between micro-batches: stored rows, int8 ones as they
  /// read back, are scored again by its scorer, nothing is evicted before the
  /// next commit. Attention of the past is gone: a scorer that needs it starts
  /// from score(). Throws Error kInvalidArgument while a micro-batch is open,
  /// kMismatch as the constructor; nothing changes then. O(rows * key_dim).
  void set_policy(Policy policy);

  /// Forgets everything; the policy stays.
  void clear() noexcept;

  /// Everything a later process needs to continue bit for bit: rows, positions,
  /// scores, offset, counters, and what they belong to (layers, dtype, row
  /// format, policy, filters), as part "sequence". Throws Error
  /// kInvalidArgument while a micro-batch is open. O(bytes).
  [[nodiscard]] Snapshot save() const;

  /// Continues a saved sequence in a cache of the same layers, dtype, row
  /// format and policy. Throws Error kMismatch naming what differs, kFile for
  /// damaged data, kInvalidArgument while a micro-batch is open, kMemoryLimit;
  /// the cache is as before then. To make that possible it holds old and new
  /// rows at the same time: byte_limit must have room for both, and
  /// kv_bytes_peak shows it. clear() first where there is no such room.
  void restore(const Snapshot& saved);

  /// True position of the next token: tokens committed, not rows kept.
  [[nodiscard]] std::size_t offset() const noexcept { return offset_; }

  [[nodiscard]] bool open() const noexcept { return open_; }

  [[nodiscard]] std::size_t layers() const noexcept { return layers_.size(); }

  [[nodiscard]] const LayerShape& layer_shape(std::size_t layer) const;
  [[nodiscard]] const KVStore& store(std::size_t layer) const;

  [[nodiscard]] const Policy& policy() const noexcept { return policy_; }

  [[nodiscard]] const SequenceOptions& options() const noexcept {
    return options_;
  }

  [[nodiscard]] SequenceStats stats() const;

 private:
  struct Layer;
  struct GroupPlan;
  struct Sharing;
  enum class Eviction { kNever, kWhenDue, kNow };

  /// What save() writes first and restore() insists on, in words.
  [[nodiscard]] std::vector<std::string> identity() const;
  [[nodiscard]] std::unique_ptr<Layer> read_layer(
      ByteReader& in, std::size_t layer, std::size_t offset);
  void check_policy(const Policy& policy) const;
  void check_observation(
      std::size_t layer, const AttentionStatistics& statistics) const;
  void share_budget();
  void plan_group(GroupPlan& plan) const;
  void plan_window(GroupPlan& plan) const;
  void plan_sharing(Sharing& sharing, Eviction eviction);
  [[nodiscard]] bool replaces(const GroupPlan& plan) const;
  void gather_scores(GroupPlan& plan) const;
  void choose_rows(const Sharing& sharing);
  void plan_merges(GroupPlan& plan) const;
  void split_choice(GroupPlan& plan) const;
  void plan_commit(Eviction eviction);
  void check_complete() const;
  void apply_plans() noexcept;
  void keep_observed() noexcept;
  void reserve_groups();
  void apply_plan(GroupPlan& plan) noexcept;
  void apply_merges(GroupPlan& plan) noexcept;
  void replace_row(const GroupPlan& plan) noexcept;

  Policy policy_;
  SequenceOptions options_;
  RowPool pool_;
  std::vector<LayerShape> shapes_;
  std::vector<std::unique_ptr<Layer>> layers_;
  // Of the last commit: their memory is kept.
  std::vector<GroupPlan> plans_;
  std::vector<Sharing> sharings_;
  std::size_t offset_ = 0;
  std::size_t open_tokens_ = 0;
  bool open_ = false;
  Pass pass_ = Pass::kRead;
  std::size_t rehearsed_ = 0;    // tokens before the last evict()
  bool ready_to_evict_ = false;  // a second reading came after the last rows
  SequenceStats counters_;
};

}  // namespace qfilters
