#include "qfilters/sequence_cache.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/sequence_layer.h"
#include "core/shape_text.h"

namespace qfilters {

namespace {

std::string describe(const LayerShape& shape) {
  return "kv_heads=" + std::to_string(shape.kv_heads) +
         " key_dim=" + std::to_string(shape.key_dim) +
         " value_dim=" + std::to_string(shape.value_dim);
}

std::uint64_t count_non_finite(std::span<const float> scores) {
  return static_cast<std::uint64_t>(std::count_if(
      scores.begin(), scores.end(), [](float s) { return !std::isfinite(s); }));
}

std::string describe(const TensorView& view) {
  return std::string(to_string(view.dtype)) + " " + shape_text(view);
}

}  // namespace

SequenceCache::SequenceCache(
    std::vector<LayerShape> layers,
    Policy policy,
    const SequenceOptions& options)
    : policy_(std::move(policy)),
      options_(options),
      pool_(options.byte_limit),
      shapes_(std::move(layers)) {
  if (shapes_.empty() || options.threads < 1 ||
      options.threads > kMostThreads) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "sequence cache: layers=" + std::to_string(shapes_.size()) +
            " threads=" + std::to_string(options.threads) +
            ": a layer and 1.." + std::to_string(kMostThreads) +
            " threads are needed");
  }
  check_policy(policy_);
  for (const LayerShape& shape : shapes_) {
    layers_.push_back(std::make_unique<Layer>(
        pool_,
        RowShape{
            options.batch,
            shape.kv_heads,
            shape.key_dim,
            shape.value_dim,
            options.dtype,
            options.format}));
    for (std::size_t g = 0; g < layers_.back()->store.shape().groups(); ++g) {
      plans_.emplace_back();
      plans_.back().layer = layers_.size() - 1;
      plans_.back().group = g;
    }
  }
  share_budget();
}

SequenceCache::~SequenceCache() = default;

void SequenceCache::check_policy(const Policy& policy) const {
  if (!policy.bounded()) return;
  const std::size_t budgets = policy.options().layer_budgets.size();
  if (budgets != 0 && budgets != shapes_.size()) {
    throw Error(
        ErrorKind::kMismatch,
        "sequence cache: " + std::to_string(shapes_.size()) +
            " layers, but budgets for " + std::to_string(budgets));
  }
  for (std::size_t l = 0; l < shapes_.size(); ++l) {
    if (shapes_[l].window != 0) continue;
    policy.scorer()->check_layer(l, shapes_[l].kv_heads, shapes_[l].key_dim);
  }
}

void SequenceCache::set_policy(Policy policy) {
  if (open_) {
    throw Error(
        ErrorKind::kInvalidArgument, "set_policy: a micro-batch is open");
  }
  check_policy(policy);
  std::vector<std::vector<float>> scores;
  for (std::size_t l = 0; policy.bounded() && l < layers_.size(); ++l) {
    for (std::size_t g = 0; g < layers_[l]->store.shape().groups(); ++g) {
      const RowsView view = rows(l);
      const std::size_t heads = view.shape().kv_heads;
      std::vector<float>& out = scores.emplace_back();
      if (shapes_[l].window != 0) continue;
      out.resize(view.rows(g));
      score_rows(*policy.scorer(), {l, g / heads, g % heads, view}, out);
    }
  }
  policy_ = std::move(policy);
  rehearsed_ = 0;
  ready_to_evict_ = false;
  share_budget();
  auto next = scores.begin();
  for (std::size_t l = 0; policy_.bounded() && l < layers_.size(); ++l) {
    for (std::size_t g = 0; g < layers_[l]->store.shape().groups(); ++g) {
      layers_[l]->store.set_scores(g, *next++);
      layers_[l]->queues[g].reset();
    }
  }
}

void SequenceCache::begin(std::size_t tokens, Pass pass) {
  if (pass == Pass::kRehearse && !policy_.rehearses()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "begin: policy " + std::string(policy_.name()) +
            " does not look at second readings");
  }
  if (open_ || tokens > kMostTokens - offset_) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "begin: tokens=" + std::to_string(tokens) +
            " offset=" + std::to_string(offset_) +
            (open_ ? ": a micro-batch is open" : ": positions exceed int32"));
  }
  open_ = true;
  open_tokens_ = tokens;
  pass_ = pass;
}

void SequenceCache::append(
    std::size_t layer, const TensorView& keys, const TensorView& values) {
  const LayerShape& shape = layer_shape(layer);
  Layer& l = *layers_[layer];
  if (!open_ || l.appended) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "append: layer " + std::to_string(layer) +
            (open_ ? " has its rows already" : ": no micro-batch is open"));
  }
  const auto fits = [&](const TensorView& view, std::size_t dim) {
    return view.dtype == options_.dtype && view.batch == options_.batch &&
           view.heads == shape.kv_heads && view.tokens == open_tokens_ &&
           view.dim == dim;
  };
  if (!fits(keys, shape.key_dim) || !fits(values, shape.value_dim)) {
    throw Error(
        ErrorKind::kShape,
        "append: keys " + describe(keys) + " and values " + describe(values) +
            " do not fit layer " + std::to_string(layer) +
            " with batch=" + std::to_string(options_.batch) + " " +
            describe(shape) + " tokens=" + std::to_string(open_tokens_) +
            " dtype=" + to_string(options_.dtype));
  }
  l.scores.assign(l.store.shape().groups() * open_tokens_, 0.0F);
  l.non_finite = 0;
  if (policy_.bounded() && shape.window == 0) {
    for (std::size_t g = 0; g < l.store.shape().groups(); ++g) {
      const auto out =
          std::span(l.scores).subspan(g * open_tokens_, open_tokens_);
      policy_.scorer()->score(
          {layer,
           g / shape.kv_heads,
           g % shape.kv_heads,
           keys,
           static_cast<std::int32_t>(offset_)},
          out);
      l.non_finite += count_non_finite(out);
    }
  }
  l.keys = keys;
  l.values = values;
  l.appended = true;
}

std::optional<AttentionNeeds> SequenceCache::attention_needs(
    std::size_t layer) const {
  if (layer_shape(layer).window != 0 || !policy_.bounded()) return std::nullopt;
  if (policy_.rehearses() && pass_ != Pass::kRehearse) return std::nullopt;
  return policy_.scorer()->attention();
}

void SequenceCache::check_observation(
    std::size_t layer, const AttentionStatistics& statistics) const {
  const auto fail = [&](ErrorKind kind, const std::string& reason) {
    throw Error(kind, "observe: layer " + std::to_string(layer) + " " + reason);
  };
  const auto needs = attention_needs(layer);
  const Layer& l = *layers_[layer];
  if (!needs) fail(ErrorKind::kInvalidArgument, "needs no attention");
  if (!l.appended || l.observed) {
    fail(
        ErrorKind::kInvalidArgument,
        l.appended ? "was observed already" : "has no new rows");
  }
  if (*needs != AttentionNeeds{statistics.kind, statistics.last_queries}) {
    fail(
        ErrorKind::kInvalidArgument,
        "needs the attention of its last " +
            std::to_string(needs->last_queries) + " queries, not of " +
            std::to_string(statistics.last_queries) + ", or another kind");
  }
  const RowsView view = rows(layer);
  bool fits = statistics.rows.size() == view.shape().groups();
  for (std::size_t g = 0; fits && g < statistics.rows.size(); ++g)
    fits = statistics.rows[g].size() == view.rows(g);
  if (!fits) {
    fail(
        ErrorKind::kShape,
        "has other rows than the " + std::to_string(statistics.rows.size()) +
            " heads that were attended to");
  }
}

void SequenceCache::observe(
    std::size_t layer, const AttentionStatistics& statistics) {
  check_observation(layer, statistics);
  Layer& l = *layers_[layer];
  const RowsView view = rows(layer);
  const std::size_t heads = view.shape().kv_heads;
  std::uint64_t non_finite = 0;
  l.observed_scores.resize(view.shape().groups());
  for (std::size_t g = 0; g < l.observed_scores.size(); ++g) {
    std::vector<float>& scores = l.observed_scores[g];
    l.copy_scores(g, open_tokens_, scores);
    policy_.scorer()->observe(
        {layer, g / heads, g % heads, view, statistics.rows}, scores);
    non_finite += count_non_finite(std::span(scores).last(open_tokens_));
  }
  l.non_finite = non_finite;
  l.observed = true;
}

RowsView SequenceCache::rows(std::size_t layer) const {
  const LayerShape& shape = layer_shape(layer);
  const Layer& l = *layers_[layer];
  const auto first = static_cast<std::int32_t>(offset_);
  if (l.appended) return {l.store, l.keys, l.values, first};
  const auto none = [&](std::size_t dim) {
    return TensorView::dense(
        nullptr, options_.dtype, options_.batch, shape.kv_heads, 0, dim);
  };
  return {l.store, none(shape.key_dim), none(shape.value_dim), first};
}

void SequenceCache::rollback() noexcept {
  for (const auto& layer : layers_) {
    layer->appended = false;
    layer->observed = false;
    layer->non_finite = 0;
    layer->keys = {};
    layer->values = {};
  }
  open_ = false;
  open_tokens_ = 0;
  pass_ = Pass::kRead;
}

void SequenceCache::clear() noexcept {
  rollback();
  for (const auto& layer : layers_) {
    for (std::size_t g = 0; g < layer->store.shape().groups(); ++g) {
      layer->queues[g].reset();
      layer->store.keep(g, {});
      layer->store.shrink(g);
    }
  }
  pool_.trim();
  offset_ = 0;
  rehearsed_ = 0;
  ready_to_evict_ = false;
  counters_ = {};
}

const LayerShape& SequenceCache::layer_shape(std::size_t layer) const {
  if (layer >= shapes_.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "sequence cache: layer " + std::to_string(layer) + " of " +
            std::to_string(shapes_.size()));
  }
  return shapes_[layer];
}

const KVStore& SequenceCache::store(std::size_t layer) const {
  static_cast<void>(layer_shape(layer));  // checks the index
  return layers_[layer]->store;
}

SequenceStats SequenceCache::stats() const {
  SequenceStats stats = counters_;
  stats.tokens = offset_;
  stats.kv_bytes_peak = pool_.peak_bytes();
  std::size_t heads = 0;
  std::size_t rows = 0;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const KVStore& store = layers_[l]->store;
    stats.kv_bytes += store.bytes();
    stats.non_finite_scores += layers_[l]->non_finite;  // of the open batch
    if (shapes_[l].window != 0) continue;
    for (std::size_t g = 0; g < store.shape().groups(); ++g, ++heads) {
      const std::size_t n = store.rows(g);
      stats.rows_min = heads == 0 ? n : std::min(stats.rows_min, n);
      stats.rows_max = std::max(stats.rows_max, n);
      rows += n;
    }
  }
  stats.rows_mean =
      heads == 0 ? 0.0 : static_cast<double>(rows) / static_cast<double>(heads);
  return stats;
}

}  // namespace qfilters
