#include "qfilters/scoring.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/key_regression.h"

#include "core/filter_checks.h"
#include "core/half.h"
#include "core/row_noise.h"
#include "core/shape_text.h"
#include "kernels/score_keys.h"
#include "kernels/widen.h"

namespace qfilters {

namespace {

kernels::HalfRows head_rows(
    const char* operation,
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::size_t out) {
  if (keys.dtype == DType::kFloat32 || batch >= keys.batch ||
      head >= keys.heads || out != keys.tokens) {
    throw Error(
        ErrorKind::kShape,
        std::string(operation) + ": keys " + to_string(keys.dtype) + " " +
            shape_text(keys) + ", batch=" + std::to_string(batch) + ", head=" +
            std::to_string(head) + ", scores=" + std::to_string(out) +
            ": 16-bit rows and one score a row are needed");
  }
  return {
      static_cast<const std::uint16_t*>(keys.row(batch, head, 0)),
      keys.token_stride,
      keys.tokens,
      keys.dim,
      half_of(keys.dtype)};
}

void check_coefficients(std::span<const float> coefficients, std::size_t dim) {
  if (coefficients.size() == quadratic_size(dim)) return;
  throw Error(
      ErrorKind::kShape,
      "score: " + std::to_string(coefficients.size()) +
          " coefficients for keys of " + std::to_string(dim) + " dimensions, " +
          std::to_string(quadratic_size(dim)) + " are needed");
}

// The canonical order for the keys [dim][kBlockRows] of a tile at once: each
// row has a slot in each of the 16 partial sums.
void score_tile(
    const float* tile,
    std::span<const float> coefficients,
    std::span<float> out) {
  constexpr std::size_t kSums = 16;
  const std::size_t dim = (coefficients.size() - 2) / 2;
  float sums[kSums][kBlockRows] = {};
  float squares[kSums][kBlockRows] = {};
  for (std::size_t d = 0; d < dim; ++d) {
    const float* const key = tile + d * kBlockRows;
    const float linear = coefficients[d];
    const float square = coefficients[dim + d];
    for (std::size_t r = 0; r < kBlockRows; ++r) {
      const float factor = linear + square * key[r];
      sums[d % kSums][r] += key[r] * factor;
      squares[d % kSums][r] += key[r] * key[r];
    }
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) {
      for (std::size_t r = 0; r < kBlockRows; ++r) {
        sums[j][r] += sums[j + half][r];
        squares[j][r] += squares[j + half][r];
      }
    }
  }
  for (std::size_t r = 0; r < out.size(); ++r) {
    const float norm = coefficients[2 * dim] * std::sqrt(squares[0][r]);
    out[r] = sums[0][r] + norm;
    out[r] = out[r] + coefficients[2 * dim + 1];
  }
}

class QFiltersScorer final : public Scorer {
 public:
  QFiltersScorer(std::shared_ptr<const FilterBank> filters, int sign)
      : filters_(std::move(filters)), sign_(static_cast<float>(sign)) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "qfilters";
  }

  [[nodiscard]] std::string identity() const override {
    return "qfilters " + filters_->fingerprint() + (sign_ < 0 ? " -" : " +");
  }

  void check_layer(std::size_t layer, std::size_t kv_heads, std::size_t key_dim)
      const override {
    check_bank("qfilters", *filters_, layer, kv_heads, key_dim);
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    score_projection(
        in.keys,
        in.batch,
        in.kv_head,
        filters_->layer(in.layer).head(in.kv_head),
        sign_,
        out);
  }

 private:
  std::shared_ptr<const FilterBank> filters_;
  float sign_;
};

class StreamingScorer final : public Scorer {
 public:
  explicit StreamingScorer(std::string_view name) noexcept : name_(name) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return name_;
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    // Positions above 2^24 tie in float32; ties go to the newer row anyway.
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] =
          static_cast<float>(in.first_position + static_cast<std::int32_t>(i));
    }
  }

 private:
  std::string_view name_;
};

class KNormScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "knorm";
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    key_norms(in.keys, in.batch, in.kv_head, out);
    for (float& score : out)
      score = -score;
  }
};

class RandomScorer final : public Scorer {
 public:
  explicit RandomScorer(std::uint64_t seed) : seed_(seed) {}

  [[nodiscard]] std::string identity() const override {
    return "random " + std::to_string(seed_);
  }

  [[nodiscard]] std::string_view name() const noexcept override {
    return "random";
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    const RowNoise noise(seed_, in.layer, in.batch, in.kv_head);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto position = static_cast<std::uint64_t>(in.first_position) + i;
      out[i] = noise(position);
    }
  }

 private:
  std::uint64_t seed_;
};

}  // namespace

void score_projection(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<const float> filter,
    float sign,
    std::span<float> out) {
  const auto rows = head_rows("score", keys, batch, head, out.size());
  if (filter.size() != keys.dim) {
    throw Error(
        ErrorKind::kShape,
        "score: filter of " + std::to_string(filter.size()) + " for keys of " +
            std::to_string(keys.dim) + " dimensions");
  }
  kernels::project_rows(rows, filter.data(), sign, out.data());
}

void score_quadratic(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<const float> coefficients,
    std::span<float> out) {
  const auto rows = head_rows("score", keys, batch, head, out.size());
  const std::size_t dim = keys.dim;
  check_coefficients(coefficients, dim);
  thread_local std::vector<float> norms;
  norms.resize(out.size());
  key_norms(keys, batch, head, norms);
  kernels::quadratic_rows(
      rows, coefficients.data(), coefficients.data() + dim, out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const float norm = coefficients[2 * dim] * norms[i];
    out[i] = out[i] + norm;
    out[i] = out[i] + coefficients[2 * dim + 1];
  }
}

void score_quadratic(
    const RowsView& rows,
    std::size_t group,
    std::span<const float> coefficients,
    std::span<float> out) {
  const std::size_t dim = rows.shape().key_dim;
  check_coefficients(coefficients, dim);
  if (out.size() != rows.rows(group)) {
    throw Error(
        ErrorKind::kShape,
        "score: room for " + std::to_string(out.size()) + " scores, not " +
            std::to_string(rows.rows(group)));
  }
  thread_local std::vector<float> tiles;
  tiles.resize(key_tile_floats(rows, group));
  read_key_tiles(rows, group, tiles);
  for (std::size_t first = 0; first < out.size(); first += kBlockRows) {
    score_tile(
        tiles.data() + first * dim,
        coefficients,
        out.subspan(first, std::min(kBlockRows, out.size() - first)));
  }
}

void key_norms(
    const TensorView& keys,
    std::size_t batch,
    std::size_t head,
    std::span<float> out) {
  kernels::square_rows(
      head_rows("key norms", keys, batch, head, out.size()), out.data());
  for (float& norm : out)
    norm = std::sqrt(norm);
}

std::size_t key_tile_floats(const RowsView& rows, std::size_t group) noexcept {
  const std::size_t tiles = (rows.rows(group) + kBlockRows - 1) / kBlockRows;
  return tiles * kBlockRows * rows.shape().key_dim;
}

void read_key_tiles(
    const RowsView& rows, std::size_t group, std::span<float> out) {
  const RowShape& shape = rows.shape();
  const std::size_t tile = kBlockRows * shape.key_dim;
  if (out.size() != key_tile_floats(rows, group)) {
    throw Error(
        ErrorKind::kShape,
        "read key tiles: room for " + std::to_string(out.size()) +
            " values, not " + std::to_string(key_tile_floats(rows, group)) +
            " for " + std::to_string(rows.rows(group)) + " rows of " +
            std::to_string(shape.key_dim));
  }
  const kernels::Half type = half_of(shape.dtype);
  const bool halves = shape.format == RowFormat::kSame;
  const std::size_t full =
      halves ? rows.store().rows(group) / kBlockRows : std::size_t{0};
  for (std::size_t i = 0; i < full; ++i) {
    kernels::widen(
        reinterpret_cast<const std::uint16_t*>(rows.store().blocks(group)[i]),
        tile,
        type,
        out.data() + i * tile);
  }
  // The others are gathered row by row: a block may be followed by new rows,
  // and int8 rows read back as halves.
  std::vector<std::uint16_t> row(shape.key_dim);
  std::vector<std::uint16_t> packed(tile);
  for (std::size_t first = full * kBlockRows; first < rows.rows(group);
       first += kBlockRows) {
    const std::size_t count = std::min(kBlockRows, rows.rows(group) - first);
    std::fill(packed.begin(), packed.end(), std::uint16_t{0});
    for (std::size_t r = 0; r < count; ++r) {
      rows.read_key(group, first + r, row.data());
      for (std::size_t d = 0; d < row.size(); ++d)
        packed[d * kBlockRows + r] = row[d];
    }
    kernels::widen(
        packed.data(), tile, type, out.data() + first * shape.key_dim);
  }
}

void read_keys(const RowsView& rows, std::size_t group, std::span<float> out) {
  const std::size_t dim = rows.shape().key_dim;
  if (out.size() != rows.rows(group) * dim) {
    throw Error(
        ErrorKind::kShape,
        "read keys: room for " + std::to_string(out.size()) + " values, not " +
            std::to_string(rows.rows(group)) + " rows of " +
            std::to_string(dim));
  }
  std::vector<float> tiles(key_tile_floats(rows, group));
  read_key_tiles(rows, group, tiles);
  for (std::size_t r = 0; r < rows.rows(group); ++r) {
    const float* from =
        tiles.data() + r / kBlockRows * kBlockRows * dim + r % kBlockRows;
    for (std::size_t d = 0; d < dim; ++d)
      out[r * dim + d] = from[d * kBlockRows];
  }
}

void read_values(
    const RowsView& rows, std::size_t group, std::span<float> out) {
  const RowShape& shape = rows.shape();
  const std::size_t dim = shape.value_dim;
  if (out.size() != rows.rows(group) * dim) {
    throw Error(
        ErrorKind::kShape,
        "read values: room for " + std::to_string(out.size()) +
            " values, not " + std::to_string(rows.rows(group)) + " rows of " +
            std::to_string(dim));
  }
  std::vector<std::uint16_t> row(dim);
  for (std::size_t r = 0; r < rows.rows(group); ++r) {
    rows.read_value(group, r, row.data());
    kernels::widen(row.data(), dim, half_of(shape.dtype), out.data() + r * dim);
  }
}

void Scorer::check_layer(
    std::size_t /*layer*/,
    std::size_t /*kv_heads*/,
    std::size_t /*key_dim*/) const {}

void Scorer::observe(
    const ObserveInput& /*in*/, std::span<float> /*scores*/) const {}

void Scorer::rescore(
    const RescoreInput& /*in*/, std::span<float> /*scores*/) const {}

void score_rows(
    const Scorer& scorer, const RescoreInput& in, std::span<float> out) {
  const RowShape& shape = in.rows.shape();
  const std::size_t rows = in.rows.rows(in.group());
  if (out.size() != rows) {
    throw Error(
        ErrorKind::kShape,
        "score rows: room for " + std::to_string(out.size()) + " scores, not " +
            std::to_string(rows));
  }
  std::vector<std::uint16_t> keys(rows * shape.key_dim);
  for (std::size_t r = 0; r < rows; ++r)
    in.rows.read_key(in.group(), r, keys.data() + r * shape.key_dim);
  const auto position = [&](std::size_t r) {
    return in.rows.position(in.group(), r);
  };
  // A scorer sees runs of consecutive positions, as when rows enter.
  for (std::size_t begin = 0, end = 0; begin < rows; begin = end) {
    for (end = begin + 1; end < rows && position(end) == position(end - 1) + 1;)
      ++end;
    TensorView run = TensorView::dense(
        keys.data() + begin * shape.key_dim,
        shape.dtype,
        shape.batch,
        shape.kv_heads,
        end - begin,
        shape.key_dim);
    run.batch_stride = run.head_stride = 0;  // one head stands for all
    scorer.score(
        {in.layer, in.batch, in.kv_head, run, position(begin)},
        out.subspan(begin, end - begin));
  }
}

std::shared_ptr<const Scorer> make_qfilters_scorer(
    std::shared_ptr<const FilterBank> filters, int sign) {
  check_given("qfilters", filters.get());
  if (sign != 1 && sign != -1) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "qfilters: sign must be +1 or -1, got " + std::to_string(sign));
  }
  return std::make_shared<QFiltersScorer>(std::move(filters), sign);
}

std::shared_ptr<const Scorer> make_streaming_scorer(std::string_view name) {
  return std::make_shared<StreamingScorer>(name);
}

std::shared_ptr<const Scorer> make_knorm_scorer() {
  return std::make_shared<KNormScorer>();
}

std::shared_ptr<const Scorer> make_random_scorer(std::uint64_t seed) {
  return std::make_shared<RandomScorer>(seed);
}

}  // namespace qfilters
