#include "llama/session.h"

#include <algorithm>
#include <string>
#include <utility>

#include "qfilters/error.h"

#include "llama/engine.h"

namespace qfilters::llama {
namespace {

class EngineSession final : public Session {
 public:
  EngineSession(
      std::shared_ptr<const Model> model,
      Policy policy,
      const SessionOptions& options)
      : engine_(std::move(model), options),
        cache_(make_cache(
            policy,
            {/*batch=*/1,
             DType::kFloat16,
             options.byte_limit,
             options.threads,
             // What evicts in every step does not move rows for it.
             policy.bounded() && policy.options().interval == 0
                 ? RowOrder::kSlot
                 : RowOrder::kTemporal,
             options.format})) {}

  void settle() override {
    if (!cache_->eviction_due()) return;
    engine_.evict(*cache_, tokens().first(cache_->offset()));
  }

  [[nodiscard]] const float* logits(std::size_t i) const override {
    return engine_.logits(i);
  }

  [[nodiscard]] std::size_t chunk() const noexcept override {
    return engine_.chunk();
  }

  [[nodiscard]] SessionStats stats() const override {
    SessionStats stats = stats_of(*cache_);
    stats.attention_seconds = engine_.attention_seconds();
    stats.eviction_seconds = engine_.eviction_seconds();
    stats.kv_bytes_peak += engine_.native_kv_bytes();
    return stats;
  }

  [[nodiscard]] const Model& model() const noexcept override {
    return engine_.model();
  }

 protected:
  void run(std::span<const Token> tokens, Logits logits) override {
    settle();
    engine_.step(*cache_, tokens, logits);
  }

  [[nodiscard]] Snapshot save_cache() const override { return cache_->save(); }

  void restore_cache(const Snapshot& saved, std::size_t tokens) override {
    auto cache = make_cache(cache_->policy(), cache_->options());
    cache->restore(saved);
    if (cache->offset() != tokens) {
      throw Error(
          ErrorKind::kFile,
          "restore: " + std::to_string(tokens) + " tokens saved with a cache " +
              "of " + std::to_string(cache->offset()));
    }
    cache_ = std::move(cache);
  }

 private:
  [[nodiscard]] std::unique_ptr<SequenceCache> make_cache(
      Policy policy, const SequenceOptions& options) const {
    return std::make_unique<SequenceCache>(
        engine_.model().layer_shapes(), std::move(policy), options);
  }

  Engine engine_;
  std::unique_ptr<SequenceCache> cache_;
};

// Names of the parts of a saved session.
constexpr const char* kModel = "model";
constexpr const char* kTokens = "tokens";

Snapshot with_tokens(
    Snapshot cache, const Model& model, std::span<const Token> tokens) {
  cache.put_text(kModel, model.file_fingerprint());
  cache.put_values<Token>(kTokens, tokens);
  return cache;
}

}  // namespace

SessionStats stats_of(const SequenceCache& cache) {
  const SequenceStats from = cache.stats();
  SessionStats stats;
  stats.tokens = from.tokens;
  stats.kv_bytes_peak = from.kv_bytes_peak;
  stats.kv_bytes_full = from.kv_bytes_full;
  stats.rows_mean = from.rows_mean;
  stats.rows_min = from.rows_min;
  stats.rows_max = from.rows_max;
  stats.evictions = from.evictions;
  for (std::size_t layer = 0; layer < cache.layers(); ++layer) {
    const KVStore& store = cache.store(layer);
    std::vector<std::size_t>& heads = stats.rows_by_head.emplace_back();
    for (std::size_t head = 0; head < store.shape().groups(); ++head) {
      heads.push_back(store.rows(head));
    }
  }
  return stats;
}

void Session::step(std::span<const Token> tokens, Logits logits) {
  const std::size_t before = tokens_.size();
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  try {
    run(tokens, logits);
  } catch (...) {
    tokens_.resize(before);
    throw;
  }
}

Snapshot Session::save_cache() const {
  throw Error(
      ErrorKind::kUnsupported, "save: llama.cpp's own cache is not saved");
}

void Session::restore_cache(const Snapshot&, std::size_t) {
  throw Error(
      ErrorKind::kUnsupported, "restore: llama.cpp's own cache is not saved");
}

Snapshot Session::save() const {
  Snapshot cache = save_cache();  // first: it may refuse
  return with_tokens(std::move(cache), model(), tokens_);
}

Snapshot session_state(
    const Model& model,
    const SequenceCache& cache,
    std::span<const Token> tokens) {
  if (cache.offset() != tokens.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "session_state: " + std::to_string(tokens.size()) +
            " tokens with a cache of " + std::to_string(cache.offset()));
  }
  return with_tokens(cache.save(), model, tokens);
}

void Session::check_model(const Snapshot& saved) const {
  if (!saved.has(kModel)) {
    throw Error(
        ErrorKind::kMismatch,
        "restore: the saved state is not that of a model's run");
  }
  const std::string file = saved.text(kModel);
  if (file != model().file_fingerprint()) {
    throw Error(
        ErrorKind::kMismatch,
        "restore: the saved state belongs to another model file than " +
            model().name() + "'s (" + file + ", not " +
            model().file_fingerprint() + ")");
  }
}

void Session::restore(const Snapshot& saved) {
  check_model(saved);
  std::vector<Token> tokens = saved.values<Token>(kTokens);
  const auto vocabulary = static_cast<Token>(model().vocabulary());
  for (const Token token : tokens) {
    if (token >= 0 && token < vocabulary) continue;
    throw Error(
        ErrorKind::kFile,
        "restore: token " + std::to_string(token) + " outside the vocabulary");
  }
  restore_cache(saved, tokens.size());
  tokens_ = std::move(tokens);
}

std::size_t Session::prefill(
    std::span<const Token> tokens,
    const std::function<bool(std::size_t done)>& progress) {
  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t count = std::min(chunk(), tokens.size() - done);
    const bool last = done + count == tokens.size();
    step(tokens.subspan(done, count), last ? Logits::kLast : Logits::kNone);
    done += count;
    if (progress && !progress(done)) break;
  }
  return done;
}

std::unique_ptr<Session> make_engine_session(
    std::shared_ptr<const Model> model,
    Policy policy,
    const SessionOptions& options) {
  return std::make_unique<EngineSession>(
      std::move(model), std::move(policy), options);
}

}  // namespace qfilters::llama
