#include "qfilters/calibrator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/checked_product.h"
#include "core/half.h"
#include "core/shape_text.h"

namespace qfilters {
namespace {

using Eigen::Index;
using Eigen::MatrixXd;
using Eigen::VectorXd;

// Rows of one rank update: large enough for Eigen's blocked product, small
// enough that its cache-dependent splitting never cuts a sum in two, which
// would make the bytes depend on the machine.
constexpr std::size_t kBlockRows = 64;

void check_queries(const TensorView& queries, const QueryShape& shape) {
  if (queries.dtype != DType::kFloat32) {
    throw Error(
        ErrorKind::kShape,
        std::string("Calibrator::add: queries are ") +
            to_string(queries.dtype) + ", not float32");
  }
  const bool fits =
      queries.heads == shape.query_heads && queries.dim == shape.dim;
  if (!fits || queries.batch > kMostSize || queries.tokens > kMostTokens) {
    throw Error(
        ErrorKind::kShape,
        "Calibrator::add: queries are " +
            shape_text(
                queries.batch, queries.heads, queries.tokens, queries.dim) +
            (fits ? ": more than a batch of " + std::to_string(kMostSize) +
                        " or " + std::to_string(kMostTokens) + " tokens"
                  : ", the layer has query_heads=" +
                        std::to_string(shape.query_heads) +
                        " dim=" + std::to_string(shape.dim)));
  }
  for (std::size_t b = 0; b < queries.batch; ++b) {
    for (std::size_t h = 0; h < queries.heads; ++h) {
      for (std::size_t t = 0; t < queries.tokens; ++t) {
        const auto* row = static_cast<const float*>(queries.row(b, h, t));
        if (std::all_of(row, row + queries.dim, [](float x) {
              return std::isfinite(x);
            })) {
          continue;
        }
        throw Error(
            ErrorKind::kInvalidArgument,
            "Calibrator::add: a query is not finite: batch=" +
                std::to_string(b) + " head=" + std::to_string(h) +
                " token=" + std::to_string(t));
      }
    }
  }
}

// The unit vector that most queries point along, or e_0 without any.
VectorXd top_direction(
    const Eigen::Ref<const MatrixXd>& second,
    const Eigen::Ref<const VectorXd>& sum) {
  if (second.diagonal().maxCoeff() <= 0.0) {
    return VectorXd::Unit(second.rows(), 0);
  }
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(second);
  if (solver.info() != Eigen::Success) {
    throw Error(
        ErrorKind::kRuntime, "Calibrator::finish: eigenvectors not found");
  }
  VectorXd direction = solver.eigenvectors().rightCols<1>();
  // Eigenvectors have no sign of their own; queries that cancel exactly leave
  // it open, and then the largest component decides.
  double orientation = direction.dot(sum);
  if (orientation == 0.0) {
    Index largest = 0;
    direction.cwiseAbs().maxCoeff(&largest);
    orientation = direction[largest];
  }
  if (orientation < 0.0) direction = -direction;
  return direction;
}

// The mean of the columns, a unit vector unless they cancel.
void write_unit_mean(const MatrixXd& columns, float* to) {
  VectorXd mean = VectorXd::Zero(columns.rows());
  for (Index c = 0; c < columns.cols(); ++c) {
    mean += columns.col(c);
  }
  mean /= static_cast<double>(columns.cols());
  mean /= std::max(mean.norm(), 1e-12);
  Eigen::Map<Eigen::VectorXf>(to, mean.size()) = mean.cast<float>();
}

// Which of `count` rows the reference takes: trunc(linspace(0, count - 1,
// samples)) in float64, or all of them.
std::vector<std::size_t> sampled_rows(std::size_t count, std::size_t samples) {
  std::vector<std::size_t> rows(std::min(count, samples));
  const bool all = count <= samples;
  const double step =
      all ? 1.0
          : static_cast<double>(count - 1) / static_cast<double>(samples - 1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = all ? i : static_cast<std::size_t>(static_cast<double>(i) * step);
  }
  rows.back() = count - 1;
  return rows;
}

float element(const TensorView& view, const void* row, std::size_t d) {
  if (view.dtype == DType::kFloat32) return static_cast<const float*>(row)[d];
  return from_half(view.dtype, static_cast<const std::uint16_t*>(row)[d]);
}

}  // namespace

Calibrator::Calibrator(const std::vector<QueryShape>& layers) {
  if (layers.empty()) {
    throw Error(ErrorKind::kInvalidArgument, "Calibrator: there are no layers");
  }
  layers_.reserve(layers.size());
  for (const QueryShape& shape : layers) {
    const std::string text =
        "Calibrator: layer " + std::to_string(layers_.size()) +
        " has query_heads=" + std::to_string(shape.query_heads) +
        " kv_heads=" + std::to_string(shape.kv_heads) +
        " dim=" + std::to_string(shape.dim);
    if (!is_size(shape.query_heads) || !is_size(shape.kv_heads) ||
        !is_size(shape.dim)) {
      throw Error(
          ErrorKind::kInvalidArgument,
          text + ": each must be in 1.." + std::to_string(kMostSize));
    }
    if (shape.query_heads % shape.kv_heads != 0) {
      throw Error(
          ErrorKind::kInvalidArgument,
          text + ": query_heads is no multiple of kv_heads");
    }
    const Moments zero{
        std::vector<double>(shape.dim * shape.dim),
        std::vector<double>(shape.dim)};
    layers_.push_back(
        {shape, std::vector<Moments>(shape.query_heads, zero), 0});
  }
}

void Calibrator::add(std::size_t layer, const TensorView& queries) {
  if (layer >= layers_.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "Calibrator::add: layer=" + std::to_string(layer) +
            " with layers=" + std::to_string(layers_.size()));
  }
  Layer& target = layers_[layer];
  check_queries(queries, target.shape);

  const auto dim = static_cast<Index>(queries.dim);
  const std::size_t block_rows = std::min(kBlockRows, queries.tokens);
  MatrixXd block(dim, static_cast<Index>(block_rows));  // a column per query
  for (std::size_t h = 0; h < queries.heads; ++h) {
    Moments& moments = target.heads[h];
    Eigen::Map<MatrixXd> second(moments.second.data(), dim, dim);
    Eigen::Map<VectorXd> sum(moments.sum.data(), dim);
    for (std::size_t b = 0; b < queries.batch; ++b) {
      for (std::size_t t = 0; t < queries.tokens; t += block_rows) {
        const std::size_t rows = std::min(block_rows, queries.tokens - t);
        for (std::size_t r = 0; r < rows; ++r) {
          const auto* row = static_cast<const float*>(queries.row(b, h, t + r));
          block.col(static_cast<Index>(r)) =
              Eigen::Map<const Eigen::VectorXf>(row, dim).cast<double>();
        }
        const auto used = block.leftCols(static_cast<Index>(rows));
        second.selfadjointView<Eigen::Lower>().rankUpdate(used);
        sum += used.rowwise().sum();
      }
    }
  }
  target.rows += std::uint64_t{queries.batch} * queries.tokens;
}

void Calibrator::merge(const Calibrator& other) {
  if (other.layers_.size() != layers_.size()) {
    throw Error(
        ErrorKind::kShape,
        "Calibrator::merge: layers=" + std::to_string(other.layers_.size()) +
            " into layers=" + std::to_string(layers_.size()));
  }
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (other.layers_[l].shape == layers_[l].shape) continue;
    const auto text = [](const QueryShape& shape) {
      return "query_heads=" + std::to_string(shape.query_heads) +
             " kv_heads=" + std::to_string(shape.kv_heads) +
             " dim=" + std::to_string(shape.dim);
    };
    throw Error(
        ErrorKind::kShape,
        "Calibrator::merge: layer " + std::to_string(l) + " with " +
            text(other.layers_[l].shape) + " into " + text(layers_[l].shape));
  }
  const auto add_all = [](std::vector<double>& to,
                          const std::vector<double>& from) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] += from[i];
    }
  };
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    for (std::size_t h = 0; h < layers_[l].heads.size(); ++h) {
      add_all(layers_[l].heads[h].second, other.layers_[l].heads[h].second);
      add_all(layers_[l].heads[h].sum, other.layers_[l].heads[h].sum);
    }
    layers_[l].rows += other.layers_[l].rows;
  }
}

std::uint64_t Calibrator::rows(std::size_t layer) const {
  if (layer >= layers_.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "Calibrator::rows: layer=" + std::to_string(layer) +
            " with layers=" + std::to_string(layers_.size()));
  }
  return layers_[layer].rows;
}

QuerySpread Calibrator::spread(
    std::size_t layer, std::size_t query_head) const {
  if (layer >= layers_.size() || query_head >= layers_[layer].heads.size() ||
      layers_[layer].rows == 0) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "Calibrator::spread: layer=" + std::to_string(layer) + " query_head=" +
            std::to_string(query_head) + " has seen no row or does not exist");
  }
  const Moments& moments = layers_[layer].heads[query_head];
  const auto rows = static_cast<double>(layers_[layer].rows);
  const std::size_t dim = moments.sum.size();
  QuerySpread out;
  for (const double sum : moments.sum)
    out.mean.push_back(sum / rows);
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      out.covariance.push_back(
          moments.second[j * dim + i] / rows - out.mean[i] * out.mean[j]);
    }
  }
  return out;
}

FilterBank Calibrator::finish(FilterMetadata metadata) const {
  metadata.n_samples = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].rows < 2) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "Calibrator::finish: layer " + std::to_string(l) + " has seen rows=" +
              std::to_string(layers_[l].rows) + ", at least 2 are needed");
    }
    metadata.n_samples = std::min(metadata.n_samples, layers_[l].rows);
  }
  std::vector<LayerFilters> filters;
  filters.reserve(layers_.size());
  for (const Layer& layer : layers_) {
    const QueryShape& shape = layer.shape;
    const auto dim = static_cast<Index>(shape.dim);
    const std::size_t group = shape.query_heads / shape.kv_heads;
    std::vector<float> values(shape.kv_heads * shape.dim);
    MatrixXd directions(dim, static_cast<Index>(group));
    for (std::size_t k = 0; k < shape.kv_heads; ++k) {
      for (std::size_t g = 0; g < group; ++g) {
        const Moments& moments = layer.heads[k * group + g];
        directions.col(static_cast<Index>(g)) = top_direction(
            Eigen::Map<const MatrixXd>(moments.second.data(), dim, dim),
            Eigen::Map<const VectorXd>(moments.sum.data(), dim));
      }
      write_unit_mean(directions, values.data() + k * shape.dim);
    }
    filters.push_back({shape.kv_heads, shape.dim, std::move(values)});
  }
  return {std::move(filters), std::move(metadata)};
}

LayerFilters compute_qfilters(
    const TensorView& queries, std::size_t max_svd_samples) {
  const std::string name = "compute_qfilters: ";
  const std::size_t heads = queries.heads;
  const std::size_t dim = queries.dim;
  if (queries.batch != 1 || !is_size(dim) || heads > kMostSize ||
      queries.tokens > kMostTokens) {
    throw Error(
        ErrorKind::kShape,
        name + "queries are " +
            shape_text(queries.batch, heads, queries.tokens, dim) +
            ", not [1, heads, tokens, dim] with up to " +
            std::to_string(kMostSize) + " heads and dims and " +
            std::to_string(kMostTokens) + " tokens");
  }
  if (queries.tokens < 2) {
    throw Error(
        ErrorKind::kInvalidArgument,
        name + "tokens=" + std::to_string(queries.tokens) +
            " a head, at least 2 are needed");
  }
  if (max_svd_samples < 2) {
    throw Error(
        ErrorKind::kInvalidArgument,
        name + "max_svd_samples must be at least 2, got " +
            std::to_string(max_svd_samples));
  }
  if (heads == 0) return {0, dim, {}};
  const auto rows = sampled_rows(queries.tokens, max_svd_samples);
  std::vector<float> taken;
  taken.reserve(checked_product({heads, rows.size(), dim}));
  for (std::size_t h = 0; h < heads; ++h) {
    for (const std::size_t t : rows) {
      const void* row = queries.row(0, h, t);
      for (std::size_t d = 0; d < dim; ++d) {
        taken.push_back(element(queries, row, d));
        if (std::isfinite(taken.back())) continue;
        throw Error(
            ErrorKind::kInvalidArgument,
            name + "a query is not finite: head=" + std::to_string(h) +
                " token=" + std::to_string(t));
      }
    }
  }
  Calibrator calibrator({{heads, heads, dim}});
  calibrator.add(
      0,
      TensorView::dense(
          taken.data(), DType::kFloat32, 1, heads, rows.size(), dim));
  return calibrator.finish({}).layer(0);
}

LayerFilters average_gqa_filters(
    const LayerFilters& query_filters, std::size_t kv_heads) {
  const std::string name = "average_gqa_filters: ";
  const std::size_t heads = query_filters.heads;
  const std::size_t dim = query_filters.dim;
  const std::vector<float>& from = query_filters.values;
  // Divide rather than multiply: heads * dim may overflow.
  if (dim == 0 || from.size() % dim != 0 || from.size() / dim != heads) {
    throw Error(
        ErrorKind::kShape,
        name + std::to_string(from.size()) + " values for shape [" +
            std::to_string(heads) + ", " + std::to_string(dim) + "]");
  }
  if (kv_heads == 0 || heads % kv_heads != 0) {
    throw Error(
        ErrorKind::kInvalidArgument,
        name + "kv_heads=" + std::to_string(kv_heads) +
            " must be positive and divide query_heads=" +
            std::to_string(heads));
  }
  const std::size_t group = heads / kv_heads;
  const auto rows = static_cast<Index>(dim);
  LayerFilters out{
      kv_heads, dim, std::vector<float>(checked_product({kv_heads, dim}))};
  for (std::size_t k = 0; group != 0 && k < kv_heads; ++k) {
    write_unit_mean(
        Eigen::Map<const Eigen::MatrixXf>(
            from.data() + k * group * dim, rows, static_cast<Index>(group))
            .cast<double>(),
        out.values.data() + k * dim);
  }
  return out;
}

}  // namespace qfilters
