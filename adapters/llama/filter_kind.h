#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "qfilters/filter_bank.h"

#include "llama/model.h"

namespace qfilters::llama {

/// Whose filters a FilterBank holds: FilterMetadata::query_site says so.
enum class FilterKind {
  kQFilters,  ///< "attention", and whatever other tools say: directions
  kAuto,      ///< "reconstruction": coefficients of make_auto_scorer()
  kExpected,  ///< "statistics": QueryStatistics
  kSqueeze,   ///< "residual": one similarity a layer
};

[[nodiscard]] FilterKind kind_of(const FilterMetadata& metadata) noexcept;

/// What calibration of that kind records as the query site.
[[nodiscard]] std::string_view query_site(FilterKind kind) noexcept;

/// Name of the policy that uses them.
[[nodiscard]] std::string_view to_string(FilterKind kind) noexcept;

/// All of them, as they are documented.
[[nodiscard]] std::span<const FilterKind> filter_kinds() noexcept;

/// The kind that a policy uses; none for one without filters.
[[nodiscard]] std::optional<FilterKind> kind_of_policy(
    std::string_view policy) noexcept;

/// Throws Error kMismatch, naming the values, when filters do not belong to
/// the model: other layers, heads or sizes than their kind has, or a known
/// fingerprint that differs.
void check_filters(const FilterBank& filters, const Model& model);

}  // namespace qfilters::llama
