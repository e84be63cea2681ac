#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/merging.h"
#include "qfilters/scoring.h"
#include "qfilters/selection.h"

namespace qfilters {

/// Which heads share a budget: the best rows of all of them stay. Windowed
/// layers have none; sequences of a batch never share.
enum class BudgetRule {
  kUniform,   ///< every head keeps the same number of rows
  kPerLayer,  ///< the heads of a layer share
  kShared,    ///< all heads of all layers share
};

[[nodiscard]] const char* to_string(BudgetRule rule) noexcept;

/// What a policy keeps. Rows are counted per KV head, on average where heads
/// share.
struct PolicyOptions {
  std::size_t budget = 512;  ///< rows kept, sinks and recent rows included
  Protection protection;
  /// Evict only once a head holds budget + interval rows (on average where
  /// heads share), down to budget. 0 evicts at every commit that exceeds the
  /// budget.
  std::size_t interval = 0;
  BudgetRule rule = BudgetRule::kUniform;
  /// Share of the budget that each head keeps in any case when heads share.
  double floor = 0.2;
  /// Rows that are chosen together: positions [i * block, (i + 1) * block), as
  /// far as a head still has them, compete with the mean of their scores. The
  /// budget may cut one block a head or sharing group, its newest rows stay.
  std::size_t block = 1;
  int sign = 1;            ///< qfilters only: +1 as published, -1 inverted
  std::uint64_t seed = 0;  ///< random only
  /// Rows each head of layer l keeps instead of `budget`, for every layer of
  /// the model (windowed ones too, which ignore it); empty: all keep `budget`.
  /// Not for kShared, where layers have no budget of their own.
  std::vector<std::size_t> layer_budgets;
  /// What becomes of the values of rows that go; null: nothing.
  std::shared_ptr<const Merger> merger;
};

/// An immutable value: a scorer, a budget, what is protected and, where there
/// is one, a merger.
class Policy {
 public:
  /// Keeps every row.
  static Policy full();

  /// By name: full, auto, qfilters, streaming, knorm, random. auto and qfilters
  /// need `filters`, each its own kind (see scoring.h, auto_scorer.h). Throws
  /// Error kInvalidArgument for an unknown name, for sinks + recent >= a
  /// budget, a block of 0 or beyond kMostSize, a floor outside 0..1, budgets of
  /// layers under kShared, a merger of attention with a scorer that does not
  /// look at any, or when filters are missing.
  static Policy make(
      std::string_view name,
      const PolicyOptions& options,
      std::shared_ptr<const FilterBank> filters = nullptr);

  /// With a scorer of one's own; name() is the scorer's. Throws as make().
  static Policy custom(
      std::shared_ptr<const Scorer> scorer, const PolicyOptions& options);

  /// The names make() knows, in the order they are documented.
  static std::span<const std::string_view> names() noexcept;

  [[nodiscard]] std::string_view name() const noexcept { return name_; }

  [[nodiscard]] bool bounded() const noexcept { return scorer_ != nullptr; }

  /// Null for a policy that keeps every row.
  [[nodiscard]] const std::shared_ptr<const Scorer>& scorer() const noexcept {
    return scorer_;
  }

  [[nodiscard]] const PolicyOptions& options() const noexcept {
    return options_;
  }

  /// Rows each head of a layer keeps (on average where heads share).
  [[nodiscard]] std::size_t budget(std::size_t layer = 0) const noexcept {
    return layer < options_.layer_budgets.size() ? options_.layer_budgets[layer]
                                                 : options_.budget;
  }

  /// Rows that `heads` heads which share their budget and hold `rows` together
  /// keep at a commit (the eviction rule); `layer` is that of the first.
  [[nodiscard]] std::size_t rows_after_commit(
      std::size_t rows,
      std::size_t heads = 1,
      std::size_t layer = 0) const noexcept {
    // Divided, so that huge limits cannot wrap around.
    const std::size_t kept = rows_within_budget(rows, heads, layer);
    return (rows - kept) / heads >= options_.interval ? kept : rows;
  }

  /// The same whatever the interval.
  [[nodiscard]] std::size_t rows_within_budget(
      std::size_t rows,
      std::size_t heads = 1,
      std::size_t layer = 0) const noexcept {
    const std::size_t keep = budget(layer);
    const bool over = bounded() && rows / heads >= keep && rows > heads * keep;
    return over ? heads * keep : rows;
  }

  /// Whether its scorer looks at second readings only (Scorer::rehearses()).
  [[nodiscard]] bool rehearses() const noexcept {
    return bounded() && scorer_->rehearses();
  }

  /// Rows each of some sharing heads keeps in any case, if it has them.
  [[nodiscard]] std::size_t least_rows(std::size_t layer = 0) const noexcept {
    return static_cast<std::size_t>(
        options_.floor * static_cast<double>(budget(layer)));
  }

 private:
  Policy() = default;

  std::string_view name_;
  std::shared_ptr<const Scorer> scorer_;
  PolicyOptions options_;
};

}  // namespace qfilters
