#include "llama/filter_kind.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "qfilters/auto_scorer.h"
#include "qfilters/error.h"
#include "qfilters/query_statistics.h"

namespace qfilters::llama {
namespace {

struct KindNames {
  FilterKind kind;
  std::string_view policy;
  std::string_view site;
};

constexpr std::array kNames = {
    KindNames{FilterKind::kAuto, "auto", "reconstruction"},
    KindNames{FilterKind::kQFilters, "qfilters", "attention"},
    KindNames{FilterKind::kExpected, "expected", "statistics"},
    KindNames{FilterKind::kSqueeze, "squeeze", "residual"},
};

constexpr std::array kKinds = [] {
  std::array<FilterKind, kNames.size()> kinds{};
  for (std::size_t i = 0; i < kinds.size(); ++i)
    kinds[i] = kNames[i].kind;
  return kinds;
}();

const KindNames& names_of(FilterKind kind) noexcept {
  return *std::ranges::find(kNames, kind, &KindNames::kind);
}

// Values each KV head has.
std::size_t size_of(FilterKind kind, const AttentionLayer& layer) noexcept {
  switch (kind) {
    case FilterKind::kQFilters:
      return layer.key_dim;
    case FilterKind::kAuto:
      return auto_size(layer.key_dim);
    case FilterKind::kExpected:
      return statistics_size(layer.key_dim, layer.query_heads / layer.kv_heads);
    case FilterKind::kSqueeze:
      return 1;
  }
  return 0;
}

}  // namespace

FilterKind kind_of(const FilterMetadata& metadata) noexcept {
  const auto* const found =
      std::ranges::find(kNames, metadata.query_site, &KindNames::site);
  return found == kNames.end() ? FilterKind::kQFilters : found->kind;
}

std::string_view query_site(FilterKind kind) noexcept {
  return names_of(kind).site;
}

std::string_view to_string(FilterKind kind) noexcept {
  return names_of(kind).policy;
}

std::span<const FilterKind> filter_kinds() noexcept {
  return kKinds;
}

std::optional<FilterKind> kind_of_policy(std::string_view policy) noexcept {
  const auto* const found =
      std::ranges::find(kNames, policy, &KindNames::policy);
  if (found == kNames.end()) return std::nullopt;
  return found->kind;
}

void check_filters(const FilterBank& filters, const Model& model) {
  const auto fail = [&](const std::string& reason) {
    throw Error(ErrorKind::kMismatch, "check_filters: " + reason);
  };
  const std::span<const AttentionLayer> layers = model.layers();
  if (filters.layers() != layers.size()) {
    fail(
        "the filters have " + std::to_string(filters.layers()) + " layers, " +
        model.name() + " has " + std::to_string(layers.size()));
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerFilters& have = filters.layer(l);
    const std::size_t size = size_of(kind_of(filters.metadata()), layers[l]);
    if (have.heads == layers[l].kv_heads && have.dim == size) continue;
    fail(
        "layer " + std::to_string(l) + ": the filters have " +
        std::to_string(have.heads) + " heads of " + std::to_string(have.dim) +
        ", " + model.name() + " needs " + std::to_string(layers[l].kv_heads) +
        " of " + std::to_string(size));
  }
  check_origin(filters.metadata(), {.model_fingerprint = model.fingerprint()});
}

}  // namespace qfilters::llama
