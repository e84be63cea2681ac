#include "eval/tasks/one_shot.h"

#include <algorithm>
#include <utility>

#include "qfilters/policy.h"

#include "eval/tasks/scoring.h"
#include "llama/engine.h"

namespace qfilters::eval {

namespace {

llama::SessionOptions session_options(const RunSpec& spec) {
  llama::SessionOptions options;
  options.chunk = spec.chunk;
  options.threads = spec.threads;
  options.format = format_of(spec);
  return options;
}

}  // namespace

OneShotContext::OneShotContext(
    std::shared_ptr<const llama::Model> model,
    std::span<const Contender> contenders,
    std::span<const Token> context,
    std::size_t tokens,
    const std::function<void(std::size_t done)>& progress)
    : model_(std::move(model)),
      contenders_(contenders),
      context_(context),
      tokens_(tokens) {
  std::size_t first_query = context.size();
  const RunSpec* reads = nullptr;
  for (const auto& [spec, filters] : contenders) {
    policies_.emplace_back();
    if (spec.policy == "llama") continue;
    reads = &spec;
    policies_.back() =
        make_policy(spec, filters, model_->layer_shapes(), tokens);
    first_query = std::min(
        first_query,
        first_query_needed(*policies_.back(), context.size(), false));
  }
  if (reads == nullptr) return;
  timed(seconds_, [&] {
    capture_ = llama::capture(
        model_, context, first_query, session_options(*reads), progress);
  });
  replay_.emplace(*capture_, context.size(), reads->threads);
}

std::unique_ptr<llama::Session> OneShotContext::open(
    std::size_t contender, Usage& usage) {
  const Contender& own = contenders_[contender];
  const RunSpec& spec = own.spec;
  const std::optional<Policy>& policy = policies_[contender];
  if (!policy) {
    const SessionFactory open_llama = [&](std::size_t tokens) {
      return open_session(spec, model_, own.filters, tokens);
    };
    return streaming_opener(open_llama, context_, tokens_)(usage);
  }
  Snapshot state;
  timed(usage.compression_seconds, [&] {
    const auto cache = replay_->one_shot(*policy, format_of(spec));
    if (policy->rehearses()) {
      llama::Engine(model_, session_options(spec)).evict(*cache, context_);
    }
    cache->set_policy(Policy::full());
    usage.kv_bytes_compressed = std::max(
        usage.kv_bytes_compressed.value_or(0), cache->stats().kv_bytes);
    state = llama::session_state(*model_, *cache, context_);
  });
  usage.kv_bytes_prefill =
      std::max(usage.kv_bytes_prefill, capture_->kv_bytes_peak);
  usage.prefill_tokens += context_.size();
  usage.prefill_seconds += seconds_;
  auto session =
      llama::make_engine_session(model_, Policy::full(), session_options(spec));
  session->restore(state);
  return session;
}

OneShotReaders::OneShotReaders(
    std::shared_ptr<const llama::Model> model,
    std::span<const Contender> contenders,
    const Codec& codec)
    : model_(std::move(model)),
      contenders_(contenders),
      codec_(codec),
      usage_(contenders.size()) {}

void OneShotReaders::read(
    std::span<const Token> context, std::size_t tokens, const Ask& ask) {
  OneShotContext all(model_, contenders_, context, tokens);
  for (std::size_t i = 0; i < contenders_.size(); ++i) {
    Reading reading(
        [&all, i](Usage& usage) { return all.open(i, usage); },
        codec_,
        usage_[i]);
    ask(i, reading);
  }
}

}  // namespace qfilters::eval
