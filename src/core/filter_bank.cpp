#include "qfilters/filter_bank.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"

namespace qfilters {
namespace {

void check_layer(const LayerFilters& layer, std::size_t index) {
  const std::string name = "FilterBank: layer " + std::to_string(index);
  const std::string shape = "[" + std::to_string(layer.heads) + ", " +
                            std::to_string(layer.dim) + "]";
  if (layer.heads == 0 || layer.dim == 0) {
    throw Error(ErrorKind::kShape, name + " is empty: " + shape);
  }
  // Divide rather than multiply: heads * dim may overflow.
  const std::size_t size = layer.values.size();
  if (size % layer.dim != 0 || size / layer.dim != layer.heads) {
    throw Error(
        ErrorKind::kShape,
        name + " has " + std::to_string(size) + " values for shape " + shape);
  }
  for (std::size_t i = 0; i < size; ++i) {
    if (!std::isfinite(layer.values[i])) {
      throw Error(
          ErrorKind::kInvalidArgument,
          name + " has the non-finite value " +
              std::to_string(layer.values[i]) + " in head " +
              std::to_string(i / layer.dim));
    }
  }
}

}  // namespace

void check_origin(
    const FilterMetadata& metadata, const FilterExpectation& expected) {
  const std::string& fingerprint = metadata.model_fingerprint;
  const auto fail = [&](const std::string& reason) {
    throw Error(
        ErrorKind::kMismatch,
        "check_origin: the filters are for '" + metadata.model_id + "' (" +
            fingerprint + "), expected " + reason);
  };
  if (expected.model_id && metadata.model_id != *expected.model_id) {
    fail("model_id '" + *expected.model_id + "'");
  }
  if (expected.model_fingerprint && !fingerprint.empty() &&
      fingerprint != *expected.model_fingerprint) {
    fail("model_fingerprint " + *expected.model_fingerprint);
  }
}

FilterBank::FilterBank(
    std::vector<LayerFilters> layers, FilterMetadata metadata)
    : layers_(std::move(layers)), metadata_(std::move(metadata)) {
  if (layers_.empty()) {
    throw Error(ErrorKind::kShape, "FilterBank: there are no layers");
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    check_layer(layers_[i], i);
  }
}

const LayerFilters& FilterBank::layer(std::size_t index) const {
  if (index >= layers_.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "FilterBank::layer: index=" + std::to_string(index) +
            " with layers=" + std::to_string(layers_.size()));
  }
  return layers_[index];
}

std::string FilterBank::fingerprint() const {
  Fingerprint hash;
  hash.add(std::uint64_t{layers_.size()});
  for (const LayerFilters& layer : layers_) {
    hash.add(std::uint64_t{layer.heads});
    hash.add(std::uint64_t{layer.dim});
    for (const float value : layer.values) {
      hash.add(std::bit_cast<std::uint32_t>(value));
    }
  }
  return hash.hex();
}

}  // namespace qfilters
