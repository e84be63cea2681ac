#include "llama/session.h"

#include <algorithm>
#include <utility>

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
        cache_(
            engine_.model().layer_shapes(),
            std::move(policy),
            {/*batch=*/1,
             DType::kFloat16,
             options.byte_limit,
             options.threads}) {}

  void step(std::span<const Token> tokens, Logits logits) override {
    engine_.step(cache_, tokens, logits);
  }

  [[nodiscard]] const float* logits(std::size_t i) const override {
    return engine_.logits(i);
  }

  [[nodiscard]] std::size_t chunk() const noexcept override {
    return engine_.chunk();
  }

  [[nodiscard]] SessionStats stats() const override {
    const SequenceStats cache = cache_.stats();
    SessionStats stats;
    stats.tokens = cache.tokens;
    stats.attention_seconds = engine_.attention_seconds();
    stats.eviction_seconds = engine_.eviction_seconds();
    stats.kv_bytes_peak = cache.kv_bytes_peak + engine_.native_kv_bytes();
    stats.kv_bytes_full = cache.kv_bytes_full;
    stats.rows_mean = cache.rows_mean;
    stats.rows_min = cache.rows_min;
    stats.rows_max = cache.rows_max;
    stats.evictions = cache.evictions;
    return stats;
  }

  [[nodiscard]] const Model& model() const noexcept override {
    return engine_.model();
  }

 private:
  Engine engine_;
  SequenceCache cache_;
};

}  // namespace

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
