#include "eval/replay.h"

#include <algorithm>
#include <optional>
#include <string>

#include "qfilters/error.h"
#include "qfilters/scoring.h"

namespace qfilters::eval {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "replay: " + message);
}

std::optional<AttentionNeeds> needs_of(const Policy& policy) {
  // A second reading is not among what was captured.
  const bool looks = policy.bounded() && !policy.rehearses();
  return looks ? policy.scorer()->attention() : std::nullopt;
}

/// How many queries at the end of `tokens` count.
std::size_t queries_that_count(
    const AttentionNeeds& needs, std::size_t tokens) {
  return needs.last_queries == 0 ? tokens
                                 : std::min(needs.last_queries, tokens);
}

/// attend() with outputs that nobody reads.
void observe_attention(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    AttentionStatistics& statistics) {
  const std::size_t dim = rows.shape().value_dim;
  std::vector<float> out(queries.heads * queries.tokens * dim);
  attend(
      queries,
      rows,
      options,
      OutputView::dense(out.data(), 1, queries.heads, queries.tokens, dim),
      &statistics);
}

}  // namespace

std::size_t first_query_needed(
    const Policy& policy, std::size_t context, bool streaming) {
  const auto needs = needs_of(policy);
  if (!needs) return context;
  return streaming ? 0 : context - queries_that_count(*needs, context);
}

Replay::Replay(const llama::Capture& capture, std::size_t context, int threads)
    : capture_(capture), context_(context), threads_(threads) {
  if (context == 0 || context > capture.tokens) {
    refuse(
        "a context of " + std::to_string(context) + " tokens of the " +
        std::to_string(capture.tokens) + " captured");
  }
}

std::vector<LayerShape> Replay::shapes() const {
  std::vector<LayerShape> shapes;
  for (const llama::CapturedLayer& layer : capture_.layers) {
    shapes.push_back(layer.shape);
  }
  return shapes;
}

std::unique_ptr<SequenceCache> Replay::make_cache(
    const Policy& policy, RowFormat format) const {
  SequenceOptions options;
  options.threads = threads_;
  options.format = format;
  return std::make_unique<SequenceCache>(shapes(), policy, options);
}

AttentionOptions Replay::attention(std::size_t layer) const {
  AttentionOptions options = capture_.layers[layer].attention;
  options.threads = threads_;
  return options;
}

/// Opens a micro-batch of the next `count` tokens.
void Replay::append(SequenceCache& cache, std::size_t count) const {
  const std::size_t begin = cache.offset();
  cache.begin(count);
  for (std::size_t l = 0; l < capture_.layers.size(); ++l) {
    cache.append(
        l, capture_.keys(l, begin, count), capture_.values(l, begin, count));
  }
}

void Replay::check_queries(const Policy& policy, std::size_t from) const {
  if (from >= context_ || from >= capture_.first_query) return;
  refuse(
      "policy " + std::string(policy.name()) + " needs queries from token " +
      std::to_string(from) + " on, captured from " +
      std::to_string(capture_.first_query) + " on");
}

std::unique_ptr<SequenceCache> Replay::streaming(
    const Policy& policy, std::size_t chunk, RowFormat format) const {
  if (chunk == 0) refuse("chunk=0");
  check_queries(policy, first_query_needed(policy, context_, true));
  auto cache = make_cache(policy, format);
  while (cache->offset() < context_) {
    const std::size_t begin = cache->offset();
    const std::size_t count = std::min(chunk, context_ - begin);
    append(*cache, count);
    for (std::size_t l = 0; l < cache->layers(); ++l) {
      const auto needs = cache->attention_needs(l);
      if (!needs) continue;
      AttentionStatistics seen{needs->kind, needs->last_queries, {}};
      observe_attention(
          capture_.queries(l, begin, count),
          cache->rows(l),
          attention(l),
          seen);
      cache->observe(l, seen);
    }
    cache->commit();
  }
  return cache;
}

std::unique_ptr<SequenceCache> Replay::one_shot(
    const Policy& policy, RowFormat format) {
  check_queries(policy, first_query_needed(policy, context_, false));
  auto cache = make_cache(policy, format);
  append(*cache, context_);
  for (std::size_t l = 0; l < cache->layers(); ++l) {
    const auto needs = cache->attention_needs(l);
    if (needs) cache->observe(l, statistics(*needs, l));
  }
  cache->commit();
  return cache;
}

std::unique_ptr<SequenceCache> Replay::full_layer(
    std::size_t layer, std::size_t tokens) const {
  SequenceOptions options;
  options.threads = threads_;
  auto cache = std::make_unique<SequenceCache>(
      std::vector{capture_.layers[layer].shape}, Policy::full(), options);
  if (tokens == 0) return cache;
  cache->begin(tokens);
  cache->append(
      0, capture_.keys(layer, 0, tokens), capture_.values(layer, 0, tokens));
  cache->commit();
  return cache;
}

// The queries that count are new rows, all others stored ones: attend() then
// leaves the rest of the queries out.
const AttentionStatistics& Replay::statistics(
    const AttentionNeeds& needs, std::size_t layer) {
  auto known = std::find_if(
      statistics_.begin(), statistics_.end(), [&](const auto& entry) {
        return entry.first == needs;
      });
  if (known == statistics_.end()) {
    statistics_.emplace_back(
        needs, std::vector<AttentionStatistics>(capture_.layers.size()));
    known = std::prev(statistics_.end());
  }
  AttentionStatistics& seen = known->second[layer];
  if (!seen.rows.empty()) return seen;
  seen.kind = needs.kind;
  seen.last_queries = needs.last_queries;
  const std::size_t count = queries_that_count(needs, context_);
  const std::size_t before = context_ - count;
  const auto cache = full_layer(layer, before);
  cache->begin(count);
  cache->append(
      0,
      capture_.keys(layer, before, count),
      capture_.values(layer, before, count));
  observe_attention(
      capture_.queries(layer, before, count),
      cache->rows(0),
      attention(layer),
      seen);
  return seen;
}

std::vector<std::vector<float>> Replay::scores(
    const Policy& policy, std::size_t layer) {
  const LayerShape& shape = capture_.layers[layer].shape;
  if (policy.rehearses()) {
    refuse(
        "policy " + std::string(policy.name()) +
        " reads the text a second time, which was not captured");
  }
  if (!policy.bounded() || shape.window != 0) return {};
  check_queries(policy, first_query_needed(policy, context_, false));
  const Scorer& scorer = *policy.scorer();
  const auto needs = scorer.attention();
  const TensorView keys = capture_.keys(layer, 0, context_);
  const auto cache = full_layer(layer, 0);
  cache->begin(context_);
  cache->append(0, keys, capture_.values(layer, 0, context_));
  const RowsView rows = cache->rows(0);
  std::vector<std::vector<float>> scores(shape.kv_heads);
  for (std::size_t h = 0; h < shape.kv_heads; ++h) {
    scores[h].resize(context_);
    scorer.score({layer, 0, h, keys, 0}, scores[h]);
    if (needs) {
      scorer.observe(
          {layer, 0, h, rows, statistics(*needs, layer).rows}, scores[h]);
    }
    if (!scorer.frozen()) scorer.rescore({layer, 0, h, rows}, scores[h]);
  }
  return scores;
}

}  // namespace qfilters::eval
