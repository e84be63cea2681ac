#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "qfilters/filter_bank.h"
#include "qfilters/merging.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

namespace qfilters::policies {

/// A policy that can be asked for by name, and what its source does where
/// nothing else is asked for. docs/policies.md has them side by side.
struct PolicyInfo {
  std::string_view name;
  std::string_view source;  ///< where the method comes from
  bool needs_filters = false;
  /// How many of so many rows are kept for the newest, where other layers keep
  /// a window of them anyway or where none does; half if null.
  std::size_t (*recent)(std::size_t budget, bool windows) = nullptr;
  std::size_t block = 1;                   ///< PolicyOptions::block
  BudgetRule rule = BudgetRule::kUniform;  ///< PolicyOptions::rule
  bool needs_layers = false;         ///< make() must know the model's layers
  std::string_view merger = "none";  ///< see make_merger()
};

/// All of them, in the order they are documented; the library's own first.
[[nodiscard]] std::span<const PolicyInfo> all() noexcept;

/// The entry of that name, null if there is none.
[[nodiscard]] const PolicyInfo* find(std::string_view name) noexcept;

/// By name, with `options` as they are, but that pyramidkv and squeeze spread
/// the budget over `layers`; with a merger of attention, a scorer that looks at
/// none becomes make_attended_scorer(). Throws Error kInvalidArgument as
/// Policy::make(), and for these two without layers or with budgets given;
/// kMismatch for filters of another kind or number of layers than squeeze
/// needs.
[[nodiscard]] Policy make(
    std::string_view name,
    const PolicyOptions& options,
    std::shared_ptr<const FilterBank> filters = nullptr,
    std::span<const LayerShape> layers = {});

/// What PolicyOptions::merger can be, by name: "none" (null) or "cam". Throws
/// Error kInvalidArgument for another.
[[nodiscard]] std::shared_ptr<const Merger> make_merger(
    std::string_view name, std::uint64_t seed);

/// Budgets of layers as PyramidKV (arXiv:2406.02069) has them: what exceeds
/// sinks + recent falls evenly from the first global layer to the last, which
/// gets a twentieth of the mean. Each is more than sinks + recent; they add up
/// to `budget` for each global layer. Throws Error kInvalidArgument unless that
/// is more, too. O(layers).
[[nodiscard]] std::vector<std::size_t> pyramid_budgets(
    std::span<const LayerShape> layers,
    std::size_t budget,
    const Protection& protection);

/// Budgets of layers as SqueezeAttention (arXiv:2404.04793) has them: k-means
/// with three groups sorts the global layers by `similarities`, one of each
/// layer: how little its attention turns the residual stream. Those in the
/// group of the largest keep `share` of the budget (but more than sinks +
/// recent), the others what is left, evenly. All keep the same where no two
/// differ. They add up to `budget` for each global layer. Throws Error
/// kInvalidArgument unless that is more than sinks + recent, for a share
/// outside 0..1 and for another number of similarities. O(layers^2).
[[nodiscard]] std::vector<std::size_t> squeeze_budgets(
    std::span<const LayerShape> layers,
    std::span<const float> similarities,
    std::size_t budget,
    const Protection& protection,
    double share = 0.35);

}  // namespace qfilters::policies
