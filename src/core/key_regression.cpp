#include "qfilters/key_regression.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <Eigen/Cholesky>
#include <Eigen/Core>

#include "qfilters/error.h"
#include "qfilters/limits.h"

namespace qfilters {
namespace {

using Eigen::Index;
using Eigen::MatrixXd;
using Eigen::VectorXd;

// Keys of one rank update: see Calibrator.
constexpr std::size_t kBlockRows = 64;

bool all_finite(std::span<const float> values) {
  return std::all_of(
      values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// The terms of a key: dimensions, their squares, norm, 1.
void write_terms(std::span<const float> key, Eigen::Ref<VectorXd> to) {
  const auto dim = static_cast<Index>(key.size());
  const auto k =
      Eigen::Map<const Eigen::VectorXf>(key.data(), dim).cast<double>();
  to.head(dim) = k;
  to.segment(dim, dim) = k.cwiseAbs2();
  to[2 * dim] = k.norm();
  to[2 * dim + 1] = 1.0;
}

// Coefficients [terms, scores] for sums over `keys` keys; the last term is the
// constant.
MatrixXd solve(
    const MatrixXd& second,
    const MatrixXd& with_worth,
    double keys,
    double ridge) {
  const Index terms = second.rows() - 1;
  const VectorXd mean = second.row(terms).head(terms).transpose() / keys;
  const Eigen::RowVectorXd mean_worth = with_worth.row(terms) / keys;
  MatrixXd covariance = second.topLeftCorner(terms, terms) / keys;
  covariance -= mean * mean.transpose();
  const MatrixXd cross = with_worth.topRows(terms) / keys - mean * mean_worth;
  // Terms that never vary get no coefficient.
  VectorXd scale = covariance.diagonal().cwiseMax(0.0).cwiseSqrt();
  for (Index i = 0; i < terms; ++i) {
    const bool varies = scale[i] > 1e-6 * std::abs(mean[i]) && scale[i] > 0;
    scale[i] = varies ? 1.0 / scale[i] : 0.0;
  }
  MatrixXd standard = scale.asDiagonal() * covariance * scale.asDiagonal();
  standard.diagonal().array() += ridge;
  MatrixXd out(terms + 1, with_worth.cols());
  out.topRows(terms) = scale.asDiagonal() *
                       standard.llt().solve(scale.asDiagonal() * cross).eval();
  out.row(terms) = mean_worth - mean.transpose() * out.topRows(terms);
  return out;
}

}  // namespace

KeyRegression::KeyRegression(
    const std::vector<KeyShape>& layers, std::size_t scores)
    : scores_(scores) {
  if (layers.empty()) {
    throw Error(
        ErrorKind::kInvalidArgument, "KeyRegression: there are no layers");
  }
  if (!is_size(scores)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "KeyRegression: scores=" + std::to_string(scores) + " must be in 1.." +
            std::to_string(kMostSize));
  }
  for (const KeyShape& shape : layers) {
    if (!is_size(shape.kv_heads) || !is_size(shape.dim)) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "KeyRegression: layer " + std::to_string(layers_.size()) +
              " has kv_heads=" + std::to_string(shape.kv_heads) +
              " dim=" + std::to_string(shape.dim) + ": each must be in 1.." +
              std::to_string(kMostSize));
    }
    const std::size_t terms = quadratic_size(shape.dim);
    layers_.push_back({shape, {}});
    layers_.back().heads.resize(
        shape.kv_heads,
        {std::vector<double>(terms * terms),
         std::vector<double>(scores * terms),
         0});
  }
}

void KeyRegression::add(
    std::size_t layer,
    std::size_t kv_head,
    std::span<const float> keys,
    std::span<const float> worth) {
  if (layer >= layers_.size() || kv_head >= layers_[layer].heads.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "KeyRegression::add: layer=" + std::to_string(layer) +
            " kv_head=" + std::to_string(kv_head) + " does not exist");
  }
  const std::size_t dim = layers_[layer].shape.dim;
  const std::size_t tokens = keys.size() / dim;
  if (keys.size() % dim != 0 || worth.size() % scores_ != 0 ||
      worth.size() / scores_ != tokens) {
    throw Error(
        ErrorKind::kShape,
        "KeyRegression::add: " + std::to_string(keys.size()) +
            " values of keys with dim=" + std::to_string(dim) + " and " +
            std::to_string(worth.size()) +
            " of what they are worth, scores=" + std::to_string(scores_));
  }
  if (!all_finite(keys) || !all_finite(worth)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "KeyRegression::add: layer=" + std::to_string(layer) +
            " kv_head=" + std::to_string(kv_head) + ": a value is not finite");
  }
  Head& head = layers_[layer].heads[kv_head];
  const auto terms = static_cast<Index>(quadratic_size(dim));
  Eigen::Map<MatrixXd> second(head.second.data(), terms, terms);
  const auto scores = static_cast<Index>(scores_);
  Eigen::Map<MatrixXd> with_worth(head.with_worth.data(), terms, scores);
  const Eigen::Map<const Eigen::MatrixXf> judged(
      worth.data(), static_cast<Index>(tokens), scores);
  MatrixXd block(terms, static_cast<Index>(kBlockRows));
  for (std::size_t t = 0; t < tokens; t += kBlockRows) {
    const std::size_t rows = std::min(kBlockRows, tokens - t);
    for (std::size_t r = 0; r < rows; ++r) {
      write_terms(
          keys.subspan((t + r) * dim, dim), block.col(static_cast<Index>(r)));
    }
    const auto used = block.leftCols(static_cast<Index>(rows));
    second.selfadjointView<Eigen::Lower>().rankUpdate(used);
    with_worth +=
        used *
        judged.middleRows(static_cast<Index>(t), static_cast<Index>(rows))
            .cast<double>();
  }
  head.keys += tokens;
}

FilterBank KeyRegression::finish(FilterMetadata metadata, double ridge) const {
  if (!(ridge > 0) || !std::isfinite(ridge)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "KeyRegression::finish: ridge=" + std::to_string(ridge) +
            " is not positive");
  }
  constexpr auto kNone = std::numeric_limits<std::uint64_t>::max();
  metadata.n_samples = kNone;
  std::vector<LayerFilters> out;
  for (const Layer& layer : layers_) {
    const auto terms = static_cast<Index>(quadratic_size(layer.shape.dim));
    const std::size_t size = scores_ * quadratic_size(layer.shape.dim);
    out.push_back({layer.shape.kv_heads, size, {}});
    const bool unseen = std::all_of(
        layer.heads.begin(), layer.heads.end(), [](const Head& head) {
          return head.keys == 0;
        });
    if (unseen) {
      out.back().values.assign(layer.shape.kv_heads * size, 0.0F);
      continue;
    }
    for (const Head& head : layer.heads) {
      if (head.keys < 2) {
        throw Error(
            ErrorKind::kInvalidArgument,
            "KeyRegression::finish: layer " + std::to_string(out.size() - 1) +
                " has seen keys=" + std::to_string(head.keys) +
                " of a head, at least 2 are needed");
      }
      metadata.n_samples = std::min(metadata.n_samples, head.keys);
      const MatrixXd second =
          Eigen::Map<const MatrixXd>(head.second.data(), terms, terms)
              .selfadjointView<Eigen::Lower>();
      const MatrixXd solved = solve(
          second,
          Eigen::Map<const MatrixXd>(
              head.with_worth.data(), terms, static_cast<Index>(scores_)),
          static_cast<double>(head.keys),
          ridge);
      for (const double value : solved.reshaped())
        out.back().values.push_back(static_cast<float>(value));
    }
  }
  if (metadata.n_samples == kNone) {
    throw Error(
        ErrorKind::kInvalidArgument, "KeyRegression::finish: no keys seen");
  }
  return {std::move(out), std::move(metadata)};
}

}  // namespace qfilters
