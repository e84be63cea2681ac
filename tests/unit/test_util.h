#pragma once

// Helpers of the unit tests: data from fixed seeds and slow references that
// share no code with what they check (core/half.h has a test of its own).

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "qfilters/error.h"
#include "qfilters/rows_view.h"
#include "qfilters/selection.h"
#include "qfilters/tensor_view.h"

#include "core/half.h"

namespace qfilters::test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// The Error that `call` throws, if any.
template <typename Call>
std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

MATCHER_P2(IsError, kind, part, "is an Error whose message has a given part") {
  if (!arg.has_value()) {
    *result_listener << "nothing was thrown";
    return false;
  }
  *result_listener << "message: " << arg->what();
  return arg->kind() == kind &&
         std::string(arg->what()).find(part) != std::string::npos;
}

inline std::uint16_t encode(DType dtype, float value) {
  return dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
}

inline float decode(DType dtype, std::uint16_t bits) {
  return dtype == DType::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
}

/// The same numbers on every machine: mean 0, variance 1, at most 3.5.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  float uniform() { return static_cast<float>(engine_() >> 40) * 0x1p-24F; }

  float normal() {
    const float sum = uniform() + uniform() + uniform() + uniform();
    return (sum - 2.0F) * 1.7320508F;
  }

  std::size_t below(std::size_t count) { return engine_() % count; }

 private:
  std::mt19937_64 engine_;
};

/// Splits `tokens` into chunks of one size; the last may be smaller.
inline std::vector<std::size_t> chunks(std::size_t tokens, std::size_t size) {
  std::vector<std::size_t> out(tokens / size, size);
  if (tokens % size != 0) out.push_back(tokens % size);
  return out;
}

/// An owned tensor [batch, heads, tokens, dim]. `padding` elements follow
/// each row; they hold a large value, so that reading them shows.
template <typename Element>
class Tensor {
 public:
  Tensor(
      DType dtype,
      std::size_t batch,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim,
      std::size_t padding = 0)
      : data_(batch * heads * tokens * (dim + padding)),
        view_(TensorView::dense(
            nullptr, dtype, batch, heads, tokens, dim + padding)) {
    view_.data = data_.data();
    view_.dim = dim;
  }

  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  Tensor(Tensor&& other) noexcept
      : data_(std::move(other.data_)), view_(other.view_) {}

  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() = default;

  [[nodiscard]] const TensorView& view() const { return view_; }

  /// Tokens first .. first + count - 1, strides as they are.
  [[nodiscard]] TensorView slice(std::size_t first, std::size_t count) const {
    TensorView part = view_;
    part.data = view_.row(0, 0, first);
    part.tokens = count;
    return part;
  }

  [[nodiscard]] std::span<Element> row(
      std::size_t b, std::size_t h, std::size_t t) {
    const auto* from = static_cast<const Element*>(view_.row(b, h, t));
    return std::span(data_).subspan(
        static_cast<std::size_t>(from - data_.data()), view_.dim);
  }

  [[nodiscard]] std::span<const Element> row(
      std::size_t b, std::size_t h, std::size_t t) const {
    return {static_cast<const Element*>(view_.row(b, h, t)), view_.dim};
  }

  std::vector<Element>& data() { return data_; }

 private:
  std::vector<Element> data_;
  TensorView view_;
};

using HalfTensor = Tensor<std::uint16_t>;
using FloatTensor = Tensor<float>;

inline HalfTensor random_halves(
    std::uint64_t seed,
    DType dtype,
    std::size_t batch,
    std::size_t heads,
    std::size_t tokens,
    std::size_t dim,
    std::size_t padding = 0) {
  Random random(seed);
  HalfTensor out(dtype, batch, heads, tokens, dim, padding);
  std::fill(out.data().begin(), out.data().end(), encode(dtype, 30000.0F));
  for (std::size_t b = 0; b < batch; ++b) {
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t t = 0; t < tokens; ++t) {
        for (auto& x : out.row(b, h, t)) {
          x = encode(dtype, random.normal());
        }
      }
    }
  }
  return out;
}

inline FloatTensor random_floats(
    std::uint64_t seed,
    std::size_t batch,
    std::size_t heads,
    std::size_t tokens,
    std::size_t dim) {
  Random random(seed);
  FloatTensor out(DType::kFloat32, batch, heads, tokens, dim);
  for (float& x : out.data()) {
    x = random.normal();
  }
  return out;
}

inline std::vector<float> random_filter(std::uint64_t seed, std::size_t size) {
  Random random(seed);
  std::vector<float> out(size);
  for (float& x : out) {
    x = random.normal();
  }
  return out;
}

inline std::vector<std::uint32_t> bits_of(std::span<const float> values) {
  std::vector<std::uint32_t> out;
  for (const float x : values) {
    out.push_back(std::bit_cast<std::uint32_t>(x));
  }
  return out;
}

/// The canonical score, literally: 16 partial sums from +0, partial sum j
/// takes d = j, j + 16, ...; a missing d counts as 0; multiply, then add; the
/// sums added pairwise by halves; times the sign. Build without contraction.
inline float canonical_score(
    DType dtype,
    std::span<const std::uint16_t> key,
    std::span<const float> filter,
    float sign) {
  float sums[16] = {};
  for (std::size_t first = 0; first < key.size(); first += 16) {
    for (std::size_t j = 0; j < 16; ++j) {
      const std::size_t d = first + j;
      const float k = d < key.size() ? decode(dtype, key[d]) : 0.0F;
      const float f = d < key.size() ? filter[d] : 0.0F;
      const float product = k * f;
      sums[j] = sums[j] + product;
    }
  }
  for (const std::size_t half : {8U, 4U, 2U, 1U}) {
    for (std::size_t j = 0; j < half; ++j) {
      sums[j] = sums[j] + sums[j + half];
    }
  }
  return sign * sums[0];
}

/// The selection rule by a plain sort: NaN below every number, equal scores
/// prefer the higher index, protected rows above all.
inline std::vector<std::uint32_t> reference_selection(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection) {
  const std::size_t rows = scores.size();
  const auto is_protected = [&](std::size_t i) {
    return i < protection.sinks || rows - i <= protection.recent;
  };
  std::vector<std::uint32_t> order(rows);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(
      order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        if (is_protected(a) != is_protected(b)) return is_protected(b);
        if (std::isnan(scores[a]) || std::isnan(scores[b])) {
          return std::isnan(scores[a]) && !std::isnan(scores[b]);
        }
        return scores[a] < scores[b];
      });
  order.erase(order.begin(), order.end() - static_cast<std::ptrdiff_t>(keep));
  std::sort(order.begin(), order.end());
  return order;
}

/// One head under the eviction rule, row by row.
class ReferenceHead {
 public:
  std::vector<std::int32_t> positions;
  std::vector<float> scores;

  void add(std::int32_t position, float score) {
    positions.push_back(position);
    scores.push_back(score);
  }

  /// The end of an update; returns the number of rows evicted.
  std::size_t evict(
      std::size_t budget, const Protection& protection, std::size_t interval) {
    const std::size_t rows = positions.size();
    if (rows <= budget || rows < budget + interval) return 0;
    const auto kept = reference_selection(scores, budget, protection);
    for (std::size_t i = 0; i < budget; ++i) {
      positions[i] = positions[kept[i]];
      scores[i] = scores[kept[i]];
    }
    positions.resize(budget);
    scores.resize(budget);
    return rows - budget;
  }
};

/// A row as RowFormat::kInt8 stores it.
struct QuantizedRow {
  std::vector<std::int8_t> elements;
  float scale = 0;
};

/// The rule literally: scale = largest |x| / 127, x / scale rounded to nearest
/// even; a row with an element that is not finite is zeros and scale NaN.
inline QuantizedRow reference_quantized(
    DType dtype, std::span<const std::uint16_t> row) {
  QuantizedRow out{std::vector<std::int8_t>(row.size()), 0};
  float largest = 0;
  for (const std::uint16_t x : row) {
    const float magnitude = std::abs(decode(dtype, x));
    if (!std::isfinite(magnitude)) {
      out.scale = kNaN;
      return out;
    }
    largest = std::max(largest, magnitude);
  }
  out.scale = largest / 127.0F;
  for (std::size_t i = 0; out.scale > 0 && i < row.size(); ++i) {
    const float x = decode(dtype, row[i]) / out.scale;
    out.elements[i] = static_cast<std::int8_t>(std::nearbyint(x));
  }
  return out;
}

/// What read_key() and read_value() give of it.
inline std::vector<std::uint16_t> read_back(
    DType dtype, const QuantizedRow& row) {
  std::vector<std::uint16_t> out;
  for (const std::int8_t x : row.elements) {
    out.push_back(encode(dtype, row.scale * static_cast<float>(x)));
  }
  return out;
}

/// A key and a value as attention sees them; int8 rows unrounded.
struct ExactRow {
  std::vector<double> key;
  std::vector<double> value;
};

inline ExactRow exact_row(
    const RowsView& rows, std::size_t group, std::size_t row) {
  const RowShape& shape = rows.shape();
  ExactRow out;
  if (shape.format == RowFormat::kInt8 && row < rows.store().rows(group)) {
    std::vector<std::byte> bytes(shape.row_bytes());
    rows.store().save_row(group, row, bytes.data());
    float scales[2];
    std::memcpy(scales, &bytes[bytes.size() - sizeof(scales)], sizeof(scales));
    for (std::size_t i = 0; i < shape.key_dim + shape.value_dim; ++i) {
      const bool is_key = i < shape.key_dim;
      (is_key ? out.key : out.value)
          .push_back(
              double{scales[is_key ? 0 : 1]} *
              static_cast<std::int8_t>(bytes[i]));
    }
    return out;
  }
  std::vector<std::uint16_t> key(shape.key_dim);
  std::vector<std::uint16_t> value(shape.value_dim);
  rows.read_key(group, row, key.data());
  rows.read_value(group, row, value.data());
  for (const std::uint16_t x : key)
    out.key.push_back(decode(shape.dtype, x));
  for (const std::uint16_t x : value)
    out.value.push_back(decode(shape.dtype, x));
  return out;
}

/// Options of attention and what the reference makes of them.
struct ReferenceAttention {
  double scale = 1;
  double soft_cap = 0;
  std::size_t window = 0;
};

/// The rows that a query sees and their weights, in float64.
struct ExpectedWeights {
  std::vector<std::size_t> rows;
  std::vector<double> weights;
  double relative = 0;  ///< what a float32 weight may differ by, see below
};

/// The bound: a float32 score of D products differs by at most
/// e = (D + 3) u scale sum|q k| + 8 u (|s| + cap), u = 2^-24 (the last term
/// is tanh, one u the scale of an int8 key); a weight then by a factor exp(2e),
/// and each of the n weights and of their running corrections (one a tile) by a
/// few u more.
inline ExpectedWeights reference_weights(
    std::span<const float> query,
    const RowsView& rows,
    std::size_t group,
    std::size_t token,
    const ReferenceAttention& options) {
  constexpr double kUnit = 0x1p-24;
  const std::int64_t at =
      rows.first_position() + static_cast<std::int64_t>(token);
  ExpectedWeights out;
  double error = 0;
  const std::size_t last = rows.store().rows(group) + token;
  for (std::size_t r = 0; r <= last; ++r) {
    const std::int64_t distance = at - rows.position(group, r);
    if (options.window != 0 &&
        distance >= static_cast<std::int64_t>(options.window)) {
      continue;
    }
    const std::vector<double> key = exact_row(rows, group, r).key;
    double dot = 0;
    double magnitude = 0;
    for (std::size_t d = 0; d < key.size(); ++d) {
      const double product = double{query[d]} * key[d];
      dot += product;
      magnitude += std::abs(product);
    }
    double score = dot * options.scale;
    if (options.soft_cap != 0) {
      score = options.soft_cap * std::tanh(score / options.soft_cap);
    }
    const auto dim = static_cast<double>(key.size());
    error = std::max(
        error,
        (dim + 3) * kUnit * std::abs(options.scale) * magnitude +
            8 * kUnit * (std::abs(score) + options.soft_cap));
    out.weights.push_back(score);
    out.rows.push_back(r);
  }
  const double max = *std::max_element(out.weights.begin(), out.weights.end());
  double sum = 0;
  for (double& w : out.weights) {
    sum += w = std::exp(w - max);
  }
  for (double& w : out.weights) {
    w /= sum;
  }
  const auto n = static_cast<double>(out.weights.size());
  out.relative = std::expm1(2 * error) + (2 * n + 16 * (n / 64 + 2)) * kUnit;
  return out;
}

struct Expected {
  std::vector<double> value;
  std::vector<double> bound;  ///< what float32 may differ by
};

/// Attention of one query over the rows of `group` it may see, in float64.
inline Expected reference_query(
    std::span<const float> query,
    const RowsView& rows,
    std::size_t group,
    std::size_t token,
    const ReferenceAttention& options) {
  const RowShape& shape = rows.shape();
  const auto seen = reference_weights(query, rows, group, token, options);
  Expected out{
      std::vector<double>(shape.value_dim),
      std::vector<double>(shape.value_dim)};
  for (std::size_t i = 0; i < seen.rows.size(); ++i) {
    const ExactRow row = exact_row(rows, group, seen.rows[i]);
    for (std::size_t d = 0; d < shape.value_dim; ++d) {
      const double term = seen.weights[i] * row.value[d];
      out.value[d] += term;
      out.bound[d] += std::abs(term) * seen.relative;
    }
  }
  return out;
}

}  // namespace qfilters::test
