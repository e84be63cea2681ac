#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/query_statistics.h"

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

// What a head's rotation comes to on average: R = diag(cosine) + the partners'
// places times sine.
struct MeanRotation {
  std::vector<double> cosine;
  std::vector<double> sine;
  std::vector<std::size_t> partner;
};

// The mean of cos and sin of `angle` times first, first + 1, ... is that at the
// middle times what is left of the length of the sum.
MeanRotation mean_rotation(
    std::span<const float> statistics,
    std::size_t dim,
    double first,
    std::size_t count) {
  MeanRotation out;
  const auto n = static_cast<double>(count);
  for (std::size_t d = 0; d < dim; ++d) {
    const auto angle = static_cast<double>(statistics[d]);
    const double step = std::sin(angle / 2);
    const double length = std::abs(step) < 1e-9
                              ? std::cos(n * angle / 2) / std::cos(angle / 2)
                              : std::sin(n * angle / 2) / (n * step);
    const double middle = angle * (first + (n - 1) / 2);
    out.cosine.push_back(length * std::cos(middle));
    out.sine.push_back(length * std::sin(middle));
    out.partner.push_back(static_cast<std::size_t>(statistics[dim + d]));
  }
  return out;
}

// Queries to come as a logit sees them: linear . k + k^T triangle k.
struct Logits {
  std::vector<float> linear;    // [dim]
  std::vector<float> triangle;  // [dim * (dim + 1) / 2], row by row
};

Logits rotated(const MeanRotation& by, std::span<const float> query) {
  const std::size_t dim = by.cosine.size();
  const auto mean = [&](std::size_t d) {
    return static_cast<double>(query[d]);
  };
  const auto covariance = [&](std::size_t i, std::size_t j) {
    if (i < j) std::swap(i, j);
    return static_cast<double>(query[dim + i * (i + 1) / 2 + j]);
  };
  Logits out;
  for (std::size_t i = 0; i < dim; ++i) {
    const std::size_t p = by.partner[i];
    out.linear.push_back(
        static_cast<float>(by.cosine[i] * mean(i) + by.sine[i] * mean(p)));
    for (std::size_t j = 0; j <= i; ++j) {
      const std::size_t q = by.partner[j];
      const double turned = by.cosine[i] * (by.cosine[j] * covariance(i, j) +
                                            by.sine[j] * covariance(i, q)) +
                            by.sine[i] * (by.cosine[j] * covariance(p, j) +
                                          by.sine[j] * covariance(p, q));
      // A half of the form, whose other triangle is folded onto this one.
      out.triangle.push_back(static_cast<float>(i == j ? turned / 2 : turned));
    }
  }
  return out;
}

// Rows of a tile [dim][kBlockRows] that are summed at a time, each apart: so
// many sums stay in registers.
constexpr std::size_t kLanes = 16;

void add_logits(
    const Logits& logits, const float* tile, std::span<float> out) noexcept {
  const std::size_t dim = logits.linear.size();
  for (std::size_t first = 0; first < out.size(); first += kLanes) {
    float sums[kLanes] = {};
    const float* triangle = logits.triangle.data();
    for (std::size_t i = 0; i < dim; ++i) {
      float inner[kLanes];
      std::fill_n(inner, kLanes, logits.linear[i]);
      for (std::size_t j = 0; j <= i; ++j) {
        const float factor = *triangle++;
        const float* const key = tile + j * kBlockRows + first;
        for (std::size_t r = 0; r < kLanes; ++r)
          inner[r] += factor * key[r];
      }
      const float* const key = tile + i * kBlockRows + first;
      for (std::size_t r = 0; r < kLanes; ++r)
        sums[r] += key[r] * inner[r];
    }
    std::copy_n(sums, std::min(kLanes, out.size() - first), out.data() + first);
  }
}

void softmax(std::span<float> logits) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float& logit : logits) {
    // In float64, whose last bits machines differ in, if any, get lost.
    logit = static_cast<float>(
        std::exp(static_cast<double>(logit) - static_cast<double>(largest)));
    sum += static_cast<double>(logit);
  }
  const auto scale = static_cast<float>(1 / sum);
  for (float& logit : logits)
    logit *= scale;
}

class ExpectedScorer final : public Scorer {
 public:
  ExpectedScorer(
      std::shared_ptr<const FilterBank> filters, const ExpectedOptions& options)
      : filters_(std::move(filters)), options_(options) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "expected";
  }

  [[nodiscard]] std::string identity() const override {
    return "expected " + filters_->fingerprint() + " future " +
           std::to_string(options_.future) + " sinks " +
           std::to_string(options_.sinks) + " epsilon " +
           std::to_string(options_.epsilon);
  }

  void check_layer(std::size_t layer, std::size_t kv_heads, std::size_t key_dim)
      const override {
    const bool fits =
        layer < filters_->layers() &&
        filters_->layer(layer).heads == kv_heads &&
        statistics_heads(key_dim, filters_->layer(layer).dim) > 0 &&
        has_partners(filters_->layer(layer), key_dim);
    if (fits) return;
    throw Error(
        ErrorKind::kMismatch,
        "expected: layer " + std::to_string(layer) + " needs statistics for " +
            std::to_string(kv_heads) + " KV heads of " +
            std::to_string(key_dim) +
            " dimensions, the filters do not have them");
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 0.0F);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    const std::size_t group = in.group();
    std::size_t sinks = 0;
    while (sinks < scores.size() &&
           in.rows.position(group, sinks) <
               static_cast<std::int64_t>(options_.sinks)) {
      ++sinks;
    }
    std::fill(scores.begin(), scores.end(), 0.0F);
    const auto others = scores.subspan(sinks);
    if (others.empty()) return;
    add_attention(in, group, sinks, others);
    multiply_norms(in.rows, group, sinks, others);
    std::fill_n(
        scores.begin(), sinks, *std::max_element(others.begin(), others.end()));
  }

 private:
  static bool has_partners(const LayerFilters& layer, std::size_t dim) {
    for (std::size_t h = 0; h < layer.heads; ++h) {
      const auto partners = layer.head(h).subspan(dim, dim);
      if (!std::ranges::all_of(partners, [&](float d) {
            return d >= 0 && d < static_cast<float>(dim);
          })) {
        return false;
      }
    }
    return true;
  }

  // The mean over the query heads of what a query to come is expected to pay.
  void add_attention(
      const RescoreInput& in,
      std::size_t group,
      std::size_t sinks,
      std::span<float> scores) const {
    const std::size_t dim = in.rows.shape().key_dim;
    const auto statistics = filters_->layer(in.layer).head(in.kv_head);
    const std::size_t heads = statistics_heads(dim, statistics.size());
    const std::size_t each = statistics_size(dim, 1) - 2 * dim;
    const MeanRotation rotation = mean_rotation(
        statistics,
        dim,
        static_cast<double>(in.rows.first_position()) +
            static_cast<double>(in.rows.new_rows()),
        options_.future);
    thread_local std::vector<float> tiles;
    thread_local std::vector<float> logits;
    tiles.resize(key_tile_floats(in.rows, group));
    read_key_tiles(in.rows, group, tiles);
    logits.resize(sinks + scores.size());
    for (std::size_t q = 0; q < heads; ++q) {
      const Logits query =
          rotated(rotation, statistics.subspan(2 * dim + q * each, each));
      for (std::size_t first = 0; first < logits.size(); first += kBlockRows) {
        add_logits(
            query,
            tiles.data() + first * dim,
            std::span(logits).subspan(
                first, std::min(kBlockRows, logits.size() - first)));
      }
      const auto counted = std::span(logits).subspan(sinks);
      softmax(counted);
      for (std::size_t r = 0; r < scores.size(); ++r)
        scores[r] += counted[r] / static_cast<float>(heads);
    }
  }

  void multiply_norms(
      const RowsView& rows,
      std::size_t group,
      std::size_t sinks,
      std::span<float> scores) const {
    const std::size_t dim = rows.shape().value_dim;
    thread_local std::vector<float> values;
    values.resize(rows.rows(group) * dim);
    read_values(rows, group, values);
    for (std::size_t r = 0; r < scores.size(); ++r) {
      float squares = 0;
      for (const float v : std::span(values).subspan((sinks + r) * dim, dim))
        squares += v * v;
      scores[r] = (scores[r] + options_.epsilon) * std::sqrt(squares);
    }
  }

  std::shared_ptr<const FilterBank> filters_;
  ExpectedOptions options_;
};

}  // namespace

std::shared_ptr<const Scorer> make_expected_scorer(
    std::shared_ptr<const FilterBank> filters, const ExpectedOptions& options) {
  if (filters == nullptr || options.future == 0 || !(options.epsilon >= 0)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        filters == nullptr
            ? "expected: no filters; make them with `qfilters calibrate`"
            : "expected: future=" + std::to_string(options.future) +
                  " epsilon=" + std::to_string(options.epsilon) +
                  ": 1 or more positions and no negative epsilon are needed");
  }
  return std::make_shared<ExpectedScorer>(std::move(filters), options);
}

}  // namespace qfilters::policies
