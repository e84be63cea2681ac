#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace qfilters {

/// Where a FilterBank comes from: enough to refuse it for another model.
/// Empty strings and zeros mean "unknown" (files of other tools).
struct FilterMetadata {
  std::string model_id = {};           ///< name for people
  std::string model_fingerprint = {};  ///< of the model they were made on
  /// "attention": Q-Filters of queries after QK-norm and RoPE;
  /// "reconstruction": coefficients of policy auto (auto_scorer.h);
  /// "statistics": those of policy expected (QueryStatistics);
  /// "residual": a similarity per layer, of policy squeeze.
  std::string query_site = {};
  std::string dataset = {};     ///< name of the calibration text
  std::string text_hash = {};   ///< FNV-1a 64 of the text's bytes, hex
  std::uint64_t n_samples = 0;  ///< query rows per head

  friend bool operator==(const FilterMetadata&, const FilterMetadata&) =
      default;
};

/// What a caller knows of the model that filters must be made for.
struct FilterExpectation {
  std::optional<std::string> model_id = {};  ///< "": none is recorded
  /// As calibration recorded it: FilterMetadata::model_fingerprint.
  std::optional<std::string> model_fingerprint = {};
};

/// Throws Error kMismatch, with both values, for another model_id than the one
/// expected, and for a recorded fingerprint that is not the one expected. Where
/// no fingerprint is recorded nothing can be compared, and this passes: then
/// only the shapes tell one model's filters from another's.
void check_origin(
    const FilterMetadata& metadata, const FilterExpectation& expected);

/// The filters of one layer: row-major [heads, dim], larger projection = keep.
struct LayerFilters {
  std::size_t heads = 0;
  std::size_t dim = 0;
  std::vector<float> values;

  [[nodiscard]] std::span<const float> head(std::size_t h) const noexcept {
    return std::span<const float>(values).subspan(h * dim, dim);
  }

  friend bool operator==(const LayerFilters&, const LayerFilters&) = default;
};

/// One frozen direction per layer and KV head.
class FilterBank {
 public:
  /// Throws Error kShape for no layers, an empty layer or a size that is not
  /// heads * dim, and kInvalidArgument for a non-finite value.
  FilterBank(std::vector<LayerFilters> layers, FilterMetadata metadata);

  [[nodiscard]] std::size_t layers() const noexcept { return layers_.size(); }

  /// Throws Error kInvalidArgument for a layer that does not exist.
  [[nodiscard]] const LayerFilters& layer(std::size_t index) const;

  [[nodiscard]] const FilterMetadata& metadata() const noexcept {
    return metadata_;
  }

  /// FNV-1a 64 over shapes and values, hex: the identity of the filters.
  [[nodiscard]] std::string fingerprint() const;

  friend bool operator==(const FilterBank&, const FilterBank&) = default;

 private:
  std::vector<LayerFilters> layers_;
  FilterMetadata metadata_;
};

}  // namespace qfilters
