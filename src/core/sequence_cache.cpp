#include "qfilters/sequence_cache.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/first_failure.h"
#include "core/sequence_layer.h"
#include "core/shape_text.h"

namespace qfilters {

// What one commit does to one group.
struct SequenceCache::GroupPlan {
  std::size_t layer = 0;
  std::size_t group = 0;
  std::size_t rows_after = 0;
  std::size_t drop_blocks = 0;  // windowed layers: whole blocks at the front
  std::size_t evicted = 0;
  bool in_place = false;    // the new row takes the slot of the one that goes
  bool keep_stored = true;  // all of them, else `stored`
  std::vector<std::uint32_t> stored;    // kept stored rows
  std::vector<std::uint32_t> incoming;  // kept new rows
};

namespace {

std::string describe(const LayerShape& shape) {
  return "kv_heads=" + std::to_string(shape.kv_heads) +
         " key_dim=" + std::to_string(shape.key_dim) +
         " value_dim=" + std::to_string(shape.value_dim);
}

std::string describe(const TensorView& view) {
  return std::string(to_string(view.dtype)) + " " + shape_text(view);
}

void fill_iota(
    std::size_t first, std::size_t last, std::vector<std::uint32_t>& out) {
  out.resize(last - first);
  std::iota(out.begin(), out.end(), static_cast<std::uint32_t>(first));
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
            options.dtype}));
    for (std::size_t g = 0; g < layers_.back()->store.shape().groups(); ++g) {
      plans_.emplace_back();
      plans_.back().layer = layers_.size() - 1;
      plans_.back().group = g;
    }
  }
}

SequenceCache::~SequenceCache() = default;

void SequenceCache::check_policy(const Policy& policy) const {
  if (!policy.bounded()) return;
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
      scores.push_back(
          shapes_[l].window != 0 ? std::vector<float>{}
                                 : score_stored(*policy.scorer(), l, g));
    }
  }
  policy_ = std::move(policy);
  auto next = scores.begin();
  for (std::size_t l = 0; policy_.bounded() && l < layers_.size(); ++l) {
    for (std::size_t g = 0; g < layers_[l]->store.shape().groups(); ++g) {
      layers_[l]->store.set_scores(g, *next++);
      layers_[l]->queues[g].reset();
    }
  }
}

std::vector<float> SequenceCache::score_stored(
    const Scorer& scorer, std::size_t layer, std::size_t group) const {
  const KVStore& store = layers_[layer]->store;
  const RowShape& shape = store.shape();
  const auto positions = store.positions(group);
  std::vector<std::uint16_t> keys(positions.size() * shape.key_dim);
  for (std::size_t r = 0; r < positions.size(); ++r) {
    store.read_key(group, r, keys.data() + r * shape.key_dim);
  }
  std::vector<float> scores(positions.size());
  // A scorer sees runs of consecutive positions, as when rows enter.
  for (std::size_t begin = 0, end = 0; begin < positions.size(); begin = end) {
    const auto gap = [](std::int32_t a, std::int32_t b) { return b != a + 1; };
    const auto from = positions.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = std::adjacent_find(from, positions.end(), gap);
    end = last == positions.end()
              ? positions.size()
              : static_cast<std::size_t>(last - positions.begin()) + 1;
    TensorView run = TensorView::dense(
        keys.data() + begin * shape.key_dim,
        shape.dtype,
        shape.batch,
        shape.kv_heads,
        end - begin,
        shape.key_dim);
    run.batch_stride = run.head_stride = 0;  // one group stands for all
    scorer.score(
        {layer,
         group / shape.kv_heads,
         group % shape.kv_heads,
         run,
         positions[begin]},
        std::span(scores).subspan(begin, end - begin));
  }
  return scores;
}

void SequenceCache::begin(std::size_t tokens) {
  if (open_ || tokens > kMostTokens - offset_) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "begin: tokens=" + std::to_string(tokens) +
            " offset=" + std::to_string(offset_) +
            (open_ ? ": a micro-batch is open" : ": positions exceed int32"));
  }
  open_ = true;
  open_tokens_ = tokens;
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
      l.non_finite += static_cast<std::uint64_t>(std::count_if(
          out.begin(), out.end(), [](float s) { return !std::isfinite(s); }));
    }
  }
  l.keys = keys;
  l.values = values;
  l.appended = true;
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

void SequenceCache::plan_group(GroupPlan& plan) const {
  const std::size_t stored = layers_[plan.layer]->store.rows(plan.group);
  plan.drop_blocks = 0;
  plan.evicted = 0;
  plan.in_place = false;
  plan.keep_stored = true;
  if (shapes_[plan.layer].window != 0) return plan_window(plan);
  plan.rows_after = policy_.rows_after_commit(stored + open_tokens_);
  if (plan.rows_after < stored + open_tokens_) return plan_eviction(plan);
  fill_iota(0, open_tokens_, plan.incoming);
}

void SequenceCache::plan_window(GroupPlan& plan) const {
  const std::size_t stored = layers_[plan.layer]->store.rows(plan.group);
  // Only whole blocks go, so that rows keep their place in the tiles. The
  // next query sees positions from `oldest` on.
  const std::size_t after = offset_ + open_tokens_;
  const std::size_t oldest =
      after - std::min(after, shapes_[plan.layer].window - 1);
  const std::size_t first = oldest / kBlockRows * kBlockRows;
  const std::size_t held = offset_ - stored;  // position of the first row
  const std::size_t gone = std::min(first - std::min(first, held), stored);
  // Rows before the window that were never stored are skipped.
  const std::size_t skip = first > offset_ ? first - offset_ : 0;
  plan.drop_blocks = skip > 0
                         ? layers_[plan.layer]->store.blocks(plan.group).size()
                         : gone / kBlockRows;
  const std::size_t kept = skip > 0 ? 0 : stored - gone;
  fill_iota(skip, open_tokens_, plan.incoming);
  plan.rows_after = kept + plan.incoming.size();
}

void SequenceCache::plan_eviction(GroupPlan& plan) const {
  Layer& l = *layers_[plan.layer];
  const std::size_t tokens = open_tokens_;
  const std::size_t stored = l.store.rows(plan.group);
  const auto old = l.store.scores(plan.group);
  const auto positions = l.store.positions(plan.group);
  const Protection& protection = policy_.options().protection;
  const bool slots = options_.order == RowOrder::kSlot;
  plan.evicted = stored + tokens - plan.rows_after;
  if (slots && tokens == 1 && stored == plan.rows_after) {
    EvictionQueue& queue = l.queues[plan.group];
    if (!queue.ready()) queue.build(positions, old, protection);
    plan.in_place = true;
    return;
  }
  thread_local std::vector<std::uint32_t> order;  // stored rows by position
  thread_local std::vector<float> scores;
  scores.resize(stored + tokens);
  if (slots) {
    fill_iota(0, stored, order);
    std::sort(order.begin(), order.end(), [&](auto a, auto b) {
      return positions[a] < positions[b];
    });
    for (std::size_t i = 0; i < stored; ++i)
      scores[i] = old[order[i]];
  } else {
    std::copy(old.begin(), old.end(), scores.begin());
  }
  std::copy_n(
      l.scores.begin() + static_cast<std::ptrdiff_t>(plan.group * tokens),
      tokens,
      scores.begin() + static_cast<std::ptrdiff_t>(stored));
  select_rows(scores, plan.rows_after, protection, plan.stored);
  const auto split = std::lower_bound(
      plan.stored.begin(),
      plan.stored.end(),
      static_cast<std::uint32_t>(stored));
  plan.incoming.assign(split, plan.stored.end());
  for (std::uint32_t& row : plan.incoming) {
    row -= static_cast<std::uint32_t>(stored);
  }
  plan.stored.erase(split, plan.stored.end());
  if (slots) {
    for (std::uint32_t& row : plan.stored)
      row = order[row];
    std::sort(plan.stored.begin(), plan.stored.end());
  }
  plan.keep_stored = false;
}

void SequenceCache::apply_plan(const GroupPlan& plan) noexcept {
  Layer& l = *layers_[plan.layer];
  if (plan.in_place) return replace_row(plan);
  l.queues[plan.group].reset();
  if (!plan.keep_stored) l.store.keep(plan.group, plan.stored);
  l.store.drop_front_blocks(plan.group, plan.drop_blocks);
  const auto scores =
      std::span(l.scores).subspan(plan.group * open_tokens_, open_tokens_);
  l.store.append(
      plan.group,
      l.keys,
      l.values,
      plan.incoming,
      static_cast<std::int32_t>(offset_),
      scores);
  l.store.shrink(plan.group);
}

void SequenceCache::replace_row(const GroupPlan& plan) noexcept {
  Layer& l = *layers_[plan.layer];
  const auto position = static_cast<std::int32_t>(offset_);
  const float score = l.scores[plan.group];
  const auto slot = l.queues[plan.group].replace(score, position);
  if (!slot) return;
  const std::size_t heads = l.store.shape().kv_heads;
  const auto row = [&](const TensorView& view) {
    return static_cast<const std::uint16_t*>(
        view.row(plan.group / heads, plan.group % heads, 0));
  };
  l.store.overwrite_row(
      plan.group, *slot, row(l.keys), row(l.values), position, score);
}

void SequenceCache::commit() {
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (open_ && layers_[l]->appended) continue;
    throw Error(
        ErrorKind::kInvalidArgument,
        !open_ ? "commit: no micro-batch is open"
               : "commit: layer " + std::to_string(l) + " has no new rows");
  }
  // Everything that can fail comes first; from apply_plan on nothing does.
  const auto count = static_cast<std::ptrdiff_t>(plans_.size());
  const int threads = options_.threads;
  FirstFailure failure;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    failure.guard([&] { plan_group(plans_[static_cast<std::size_t>(i)]); });
  }
  failure.rethrow();
  reserve_groups();
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    apply_plan(plans_[static_cast<std::size_t>(i)]);
  }

  std::uint64_t evicted = 0;
  for (const GroupPlan& plan : plans_)
    evicted += plan.evicted;
  counters_.rows_evicted += evicted;
  counters_.evictions += evicted > 0 ? 1 : 0;
  for (const auto& layer : layers_) {
    counters_.non_finite_scores += layer->non_finite;
    layer->non_finite = 0;
    counters_.kv_bytes_full += layer->store.shape().groups() *
                               layer->store.shape().row_bytes() * open_tokens_;
  }
  offset_ += open_tokens_;
  rollback();  // closes the micro-batch
}

void SequenceCache::reserve_groups() {
  std::size_t done = 0;
  try {
    for (; done < plans_.size(); ++done) {
      const GroupPlan& plan = plans_[done];
      layers_[plan.layer]->store.reserve(
          plan.group, plan.rows_after + plan.drop_blocks * kBlockRows);
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) {
      layers_[plans_[i].layer]->store.shrink(plans_[i].group);
    }
    throw;
  }
}

void SequenceCache::rollback() noexcept {
  for (const auto& layer : layers_) {
    layer->appended = false;
    layer->non_finite = 0;
    layer->keys = {};
    layer->values = {};
  }
  open_ = false;
  open_tokens_ = 0;
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
