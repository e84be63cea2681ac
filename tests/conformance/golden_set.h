#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "qfilters/config.h"
#include "qfilters/filter_bank.h"
#include "qfilters/kv_cache.h"
#include "qfilters/tensor_view.h"

#include "conformance/npz_arrays.h"

namespace qfilters::golden {

using Json = nlohmann::json;

/// A golden folder: the manifest and the arrays beside it.
class GoldenSet {
 public:
  /// Throws BadFolder.
  explicit GoldenSet(std::filesystem::path folder);

  [[nodiscard]] const std::filesystem::path& folder() const noexcept {
    return folder_;
  }

  [[nodiscard]] const Json& groups() const noexcept { return groups_; }

  [[nodiscard]] const Json& cases(const std::string& group) const;

  /// The arrays that a group's "file" names, or pools().
  [[nodiscard]] const NpzArrays& arrays(const std::string& group) const;
  [[nodiscard]] const NpzArrays& pools() const;

 private:
  const NpzArrays& file(const std::string& name) const;

  std::filesystem::path folder_;
  Json groups_;
  mutable std::map<std::string, NpzArrays> files_;
};

/// An owned tensor [batch, heads, tokens, dim] as a cache takes it.
class Stream {
 public:
  /// `at(b, h, t, d)` gives each element; it is rounded to nearest even.
  template <typename At>
  Stream(
      DType dtype,
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim,
      At&& at)
      : Stream(dtype, batch, heads, tokens, dim) {
    for (std::size_t b = 0; b < batch; ++b) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t t = 0; t < tokens; ++t) {
          for (std::size_t d = 0; d < dim; ++d)
            push(at(b, h, t, d));
        }
      }
    }
  }

  /// From a member of an .npz file: float32 numbers, or 16-bit patterns.
  Stream(DType dtype, const Array& array);

  /// Tokens first .. first + count - 1, strides as they are.
  [[nodiscard]] TensorView slice(std::size_t first, std::size_t count) const;

  [[nodiscard]] std::size_t tokens() const noexcept { return tokens_; }

  /// What the tensor holds, as a number.
  [[nodiscard]] float at(
      std::size_t b, std::size_t h, std::size_t t, std::size_t d) const;

 private:
  Stream(
      DType dtype,
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim);
  void push(float value);

  DType dtype_;
  std::size_t batch_;
  std::size_t heads_;
  std::size_t tokens_;
  std::size_t dim_;
  std::vector<float> floats_;
  std::vector<std::uint16_t> halves_;
};

/// Bits of the nearest 16-bit number, ties to even.
[[nodiscard]] std::uint16_t to_half(float value);
[[nodiscard]] std::uint16_t to_bfloat(float value);

[[nodiscard]] DType dtype_of(const std::string& name);

/// B, H, T, D, row0, kind and in_dtype of a case.
struct Source {
  std::size_t batch = 1;
  std::size_t heads = 1;
  std::size_t tokens = 0;
  std::size_t dim = 0;
  std::size_t row0 = 0;
  std::string kind;
  DType dtype = DType::kFloat16;
};

/// The manifest's conventions.
[[nodiscard]] Stream selection_keys(const GoldenSet& set, const Source& from);
[[nodiscard]] Stream fallback_keys(const GoldenSet& set, const Source& from);
[[nodiscard]] Stream values_for(const Source& from);

/// The first `heads` filters of the pool of a kind.
[[nodiscard]] LayerFilters pool_filters(
    const GoldenSet& set,
    const std::string& kind,
    std::size_t heads,
    std::size_t dim);

/// budget, n_sink, recent, sign and, where given, calib_tokens of a case;
/// quiet about retention.
[[nodiscard]] Config config_of(const Json& golden);

/// CRC-32 of the keys or values [groups, rows, dim] of a view.
enum class Rows { kKeys, kValues };
[[nodiscard]] std::uint32_t crc_of(const RowsView& view, Rows which);
/// CRC-32 of the positions [groups, rows] that a cache stores.
[[nodiscard]] std::uint32_t crc_of_positions(
    QFiltersKVCache& cache, std::size_t groups);
[[nodiscard]] std::uint32_t crc_of(const std::vector<float>& values);

/// "name is X, golden Y" for the first name that differs, or nothing.
class Comparison {
 public:
  template <typename T, typename U>
  Comparison& is(const std::string& name, const T& ours, const U& golden) {
    if (difference_.empty() && !(Json(ours) == Json(golden))) {
      difference_ =
          name + " is " + Json(ours).dump() + ", golden " + Json(golden).dump();
    }
    return *this;
  }

  [[nodiscard]] const std::string& difference() const noexcept {
    return difference_;
  }

 private:
  std::string difference_;
};

}  // namespace qfilters::golden
