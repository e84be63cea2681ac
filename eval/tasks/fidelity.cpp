#include "eval/tasks/fidelity.h"

#include <cmath>
#include <string>
#include <utility>

#include "qfilters/attention.h"
#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "eval/tasks/rank_correlation.h"

namespace qfilters::eval {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "fidelity: " + message);
}

void add_means(FidelityResult& result, std::span<const LayerShape> shapes) {
  std::size_t heads = 0;
  std::size_t ranked = 0;
  double correlation = 0;
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    if (shapes[l].window != 0) continue;
    for (std::size_t h = 0; h < shapes[l].kv_heads; ++h, ++heads) {
      result.mean_error += result.error[l][h];
      if (!result.rank_correlation[l][h]) continue;
      correlation += *result.rank_correlation[l][h];
      ++ranked;
    }
  }
  if (heads > 0) result.mean_error /= static_cast<double>(heads);
  if (ranked > 0) {
    result.mean_rank_correlation = correlation / static_cast<double>(ranked);
  }
}

}  // namespace

void check_fidelity_options(const FidelityOptions& options) {
  const auto fits = [](std::size_t n) { return n > 0 && n <= kMostTokens / 2; };
  if (fits(options.tokens) && fits(options.later)) return;
  refuse(
      "tokens=" + std::to_string(options.tokens) +
      " later=" + std::to_string(options.later) + ": each must be in 1.." +
      std::to_string(kMostTokens / 2));
}

Fidelity::Fidelity(Replay& replay)
    : replay_(replay), later_(replay.capture().tokens - replay.context()) {
  const llama::Capture& capture = replay.capture();
  if (later_ == 0 || capture.first_query > replay.context()) {
    refuse(
        "queries behind token " + std::to_string(replay.context()) +
        " are needed; captured: " + std::to_string(capture.tokens) +
        " tokens, queries from token " + std::to_string(capture.first_query) +
        " on");
  }
  for (std::size_t l = 0; l < capture.layers.size(); ++l) {
    const auto cache = replay.full_layer(l, replay.context());
    AttentionStatistics paid;
    cache->begin(later_);
    out_.push_back(attend_later(*cache, 0, l, &paid));
    // A windowed layer has dropped rows, and nobody ranks them.
    const bool global = capture.layers[l].shape.window == 0;
    future_.push_back(
        global ? std::move(paid.rows) : std::vector<std::vector<float>>{});
    for (std::vector<float>& head : future_.back()) {
      head.resize(replay.context());
    }
  }
}

/// Gives a layer of an open cache the later rows and lets their queries attend.
std::vector<float> Fidelity::attend_later(
    SequenceCache& cache,
    std::size_t cache_layer,
    std::size_t layer,
    AttentionStatistics* statistics) const {
  const llama::Capture& capture = replay_.capture();
  const std::size_t begin = replay_.context();
  cache.append(
      cache_layer,
      capture.keys(layer, begin, later_),
      capture.values(layer, begin, later_));
  const std::size_t heads = capture.layers[layer].query_heads;
  const std::size_t dim = capture.layers[layer].shape.value_dim;
  std::vector<float> out(heads * later_ * dim);
  attend(
      capture.queries(layer, begin, later_),
      cache.rows(cache_layer),
      replay_.attention(layer),
      OutputView::dense(out.data(), 1, heads, later_, dim),
      statistics);
  return out;
}

double Fidelity::error_of(
    const std::vector<float>& out, std::size_t layer, std::size_t head) const {
  const std::vector<float>& whole = out_[layer];
  const std::size_t size =
      whole.size() / replay_.capture().layers[layer].shape.kv_heads;
  double difference = 0;
  double norm = 0;
  for (std::size_t i = head * size; i < (head + 1) * size; ++i) {
    const double d = static_cast<double>(out[i]) - whole[i];
    difference += d * d;
    norm += static_cast<double>(whole[i]) * whole[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : 0.0;
}

FidelityResult Fidelity::measure(
    const Policy& policy, SequenceCache& cache) const {
  const llama::Capture& capture = replay_.capture();
  if (cache.layers() != capture.layers.size() ||
      cache.offset() != replay_.context()) {
    throw Error(
        ErrorKind::kMismatch,
        "fidelity: a cache of " + std::to_string(cache.layers()) +
            " layers that has read " + std::to_string(cache.offset()) +
            " tokens; captured: " + std::to_string(capture.layers.size()) +
            " layers, a context of " + std::to_string(replay_.context()));
  }
  FidelityResult result;
  std::vector<LayerShape> shapes;
  cache.begin(later_);
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    shapes.push_back(cache.layer_shape(l));
    const std::size_t heads = shapes.back().kv_heads;
    const std::vector<float> out = attend_later(cache, l, l, nullptr);
    const auto scores = replay_.scores(policy, l);
    result.error.emplace_back(heads);
    result.rank_correlation.emplace_back(heads);
    result.rows.emplace_back(heads);
    for (std::size_t h = 0; h < heads; ++h) {
      result.error[l][h] = error_of(out, l, h);
      result.rows[l][h] = cache.store(l).rows(h);
      if (!scores.empty()) {
        result.rank_correlation[l][h] =
            rank_correlation(scores[h], future_[l][h]);
      }
    }
  }
  cache.rollback();
  add_means(result, shapes);
  return result;
}

}  // namespace qfilters::eval
