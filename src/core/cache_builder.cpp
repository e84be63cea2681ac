#include "qfilters/cache_builder.h"

#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

namespace qfilters {
namespace {

std::string text_of(std::size_t heads, std::size_t dim) {
  return "[" + std::to_string(heads) + ", " + std::to_string(dim) + "]";
}

// Returns the number of attention layers.
std::size_t check_model(const ModelShape& model) {
  std::size_t count = 0;
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    const auto& layer = model.layers[l];
    if (!layer) continue;
    ++count;
    if (is_size(layer->kv_heads) && is_size(layer->key_dim)) continue;
    throw Error(
        ErrorKind::kInvalidArgument,
        "for_model: layer " + std::to_string(l) + " of [kv_heads, key_dim] = " +
            text_of(layer->kv_heads, layer->key_dim));
  }
  if (count == 0) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "for_model: none of " + std::to_string(model.layers.size()) +
            " layers has attention");
  }
  return count;
}

[[noreturn]] void mismatch(const std::string& what) {
  throw Error(ErrorKind::kMismatch, "for_model: " + what);
}

void check_filters(
    const ModelShape& model, std::size_t count, const FilterBank& filters) {
  if (!model.fingerprint.empty()) {
    check_origin(filters.metadata(), {.model_fingerprint = model.fingerprint});
  }
  if (filters.layers() != count) {
    mismatch(
        std::to_string(filters.layers()) + " layers of filters for " +
        std::to_string(count) + " attention layers");
  }
  std::size_t next = 0;
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    const auto& layer = model.layers[l];
    if (!layer) continue;
    const LayerFilters& own = filters.layer(next++);
    if (own.heads == layer->kv_heads && own.dim == layer->key_dim) continue;
    mismatch(
        "layer " + std::to_string(l) + " has [kv_heads, key_dim] = " +
        text_of(layer->kv_heads, layer->key_dim) + ", its filters " +
        text_of(own.heads, own.dim));
  }
}

}  // namespace

std::vector<std::optional<QFiltersKVCache>> CacheBuilder::for_model(
    const ModelShape& model, const Config& config, const FilterBank* filters) {
  validate(config);
  const std::size_t count = check_model(model);
  if (filters != nullptr) check_filters(model, count, *filters);
  std::vector<std::optional<QFiltersKVCache>> caches;
  std::size_t next = 0;
  for (const auto& layer : model.layers) {
    if (!layer) {
      caches.emplace_back();
    } else if (filters != nullptr) {
      caches.emplace_back(std::in_place, config, filters->layer(next++));
    } else {
      caches.emplace_back(std::in_place, config);
    }
  }
  return caches;
}

}  // namespace qfilters
