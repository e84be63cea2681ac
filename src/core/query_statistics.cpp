#include "qfilters/query_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "qfilters/error.h"

#include "core/shape_text.h"

namespace qfilters {
namespace {

std::vector<QueryShape> shapes_of(const std::vector<QueryLayer>& layers) {
  std::vector<QueryShape> shapes;
  shapes.reserve(layers.size());
  for (const QueryLayer& layer : layers)
    shapes.push_back(layer.shape);
  return shapes;
}

void check_rotation(std::size_t layer, const QueryLayer& facts) {
  const auto& [angle, partner] = facts.rotation;
  const std::size_t dim = facts.shape.dim;
  const bool fits = angle.size() == dim && partner.size() == dim;
  if (fits &&
      std::ranges::all_of(partner, [&](std::size_t d) { return d < dim; })) {
    return;
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      "QueryStatistics: layer " + std::to_string(layer) +
          " of dim=" + std::to_string(dim) + " has a rotation of " +
          std::to_string(angle.size()) + " angles and " +
          std::to_string(partner.size()) +
          " partners: one of each a dimension is needed, partners below dim");
}

// Mean and covariance of one query head, behind what is there.
void append_head(
    const QuerySpread& spread, double scale, std::vector<float>& out) {
  for (const double mean : spread.mean)
    out.push_back(static_cast<float>(scale * mean));
  for (const double covariance : spread.covariance)
    out.push_back(static_cast<float>(scale * scale * covariance));
}

LayerFilters filters_of(
    const QueryLayer& layer, const Calibrator& moments, std::size_t index) {
  const auto& [query_heads, kv_heads, dim] = layer.shape;
  const std::size_t group = query_heads / kv_heads;
  LayerFilters out{kv_heads, statistics_size(dim, group), {}};
  if (moments.rows(index) == 0) {
    out.values.assign(out.heads * out.dim, 0.0F);
    return out;
  }
  for (std::size_t k = 0; k < kv_heads; ++k) {
    const auto& [angle, partner] = layer.rotation;
    out.values.insert(out.values.end(), angle.begin(), angle.end());
    for (const std::size_t d : partner)
      out.values.push_back(static_cast<float>(d));
    for (std::size_t g = 0; g < group; ++g) {
      append_head(
          moments.spread(index, k * group + g),
          static_cast<double>(layer.scale),
          out.values);
    }
  }
  return out;
}

}  // namespace

std::vector<float> turn_back(
    const Rotation& rotation,
    const TensorView& rows,
    std::int32_t first_position) {
  const std::size_t dim = rotation.angle.size();
  if (rows.dtype != DType::kFloat32 || rows.batch != 1 || rows.dim != dim ||
      rotation.partner.size() != dim) {
    throw Error(
        ErrorKind::kShape,
        std::string("turn back: rows ") + to_string(rows.dtype) + " " +
            shape_text(rows) + " and a rotation of " + std::to_string(dim) +
            " dimensions: float32 [1, heads, tokens, dim] are needed");
  }
  std::vector<float> out(rows.heads * rows.tokens * dim);
  std::vector<double> cosine(dim);
  std::vector<double> sine(dim);
  for (std::size_t t = 0; t < rows.tokens; ++t) {
    const double position =
        static_cast<double>(first_position) + static_cast<double>(t);
    for (std::size_t d = 0; d < dim; ++d) {
      const double angle = static_cast<double>(rotation.angle[d]) * position;
      cosine[d] = std::cos(angle);
      sine[d] = std::sin(angle);
    }
    for (std::size_t h = 0; h < rows.heads; ++h) {
      const auto* const row = static_cast<const float*>(rows.row(0, h, t));
      float* const to = out.data() + (h * rows.tokens + t) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        to[d] = static_cast<float>(
            cosine[d] * static_cast<double>(row[d]) -
            sine[d] * static_cast<double>(row[rotation.partner[d]]));
      }
    }
  }
  return out;
}

QueryStatistics::QueryStatistics(std::vector<QueryLayer> layers)
    : layers_(std::move(layers)), moments_(shapes_of(layers_)) {
  for (std::size_t l = 0; l < layers_.size(); ++l)
    check_rotation(l, layers_[l]);
}

void QueryStatistics::add(
    std::size_t layer, const TensorView& queries, std::int32_t first_position) {
  if (layer >= layers_.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "QueryStatistics::add: layer=" + std::to_string(layer) +
            " with layers=" + std::to_string(layers_.size()));
  }
  const std::vector<float> rows =
      turn_back(layers_[layer].rotation, queries, first_position);
  moments_.add(
      layer,
      TensorView::dense(
          rows.data(),
          DType::kFloat32,
          1,
          queries.heads,
          queries.tokens,
          queries.dim));
}

FilterBank QueryStatistics::finish(FilterMetadata metadata) const {
  constexpr auto kNone = std::numeric_limits<std::uint64_t>::max();
  metadata.n_samples = kNone;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const std::uint64_t rows = moments_.rows(l);
    if (rows == 1) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "QueryStatistics::finish: layer " + std::to_string(l) +
              " has seen rows=1, at least 2 are needed");
    }
    if (rows > 0) metadata.n_samples = std::min(metadata.n_samples, rows);
  }
  if (metadata.n_samples == kNone) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "QueryStatistics::finish: no queries seen");
  }
  std::vector<LayerFilters> out;
  for (std::size_t l = 0; l < layers_.size(); ++l)
    out.push_back(filters_of(layers_[l], moments_, l));
  return {std::move(out), std::move(metadata)};
}

}  // namespace qfilters
