#include "llama/engine.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include <llama.h>

#include "qfilters/attention.h"
#include "qfilters/error.h"

#include "llama/cue.h"
#include "llama/runtime.h"

namespace qfilters::llama {
namespace {

constexpr std::size_t kNoSlot = std::numeric_limits<std::size_t>::max();

// Leads into a second reading, behind the cue.
constexpr std::size_t kLeadTokens = 8;

[[noreturn]] void fail(ErrorKind kind, const std::string& reason) {
  throw Error(kind, "Engine::step: " + reason);
}

/// Adds the time from its construction to its end to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}

  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  ~Stopwatch() {
    const std::chrono::duration<double> time =
        std::chrono::steady_clock::now() - start_;
    seconds_ += time.count();
  }

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
};

}  // namespace

/// Leaves cache, context and tap fit for the next step, whatever happens.
/// The new rows live in llama.cpp's cache until this ends.
class Engine::Step {
 public:
  Step(Engine& engine, SequenceCache& cache) : engine_(engine), cache_(cache) {
    engine_.cache_ = &cache;
    engine_.layers_done_ = 0;
    engine_.global_cells_checked_ = false;
    engine_.windowed_cells_checked_ = false;
  }

  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  ~Step() {
    engine_.tap_.reset();
    cache_.rollback();  // does nothing after a commit
    llama_memory_seq_rm(
        llama_get_memory(engine_.context_.get()), /*seq_id=*/0, -1, -1);
    engine_.cache_ = nullptr;
  }

 private:
  Engine& engine_;
  SequenceCache& cache_;
};

Engine::Engine(
    std::shared_ptr<const Model> model, const SessionOptions& options)
    : model_(std::move(model)),
      chunk_(options.chunk),
      threads_(options.threads),
      tap_(
          [this](const AttentionNode& node) { on_attention(node); },
          /*skip_native=*/true) {
  if (model_ == nullptr) {
    throw Error(ErrorKind::kInvalidArgument, "Engine: no model");
  }
  check_options("Engine", options);
  ContextSpec spec;
  spec.cells = pad_cells(chunk_);
  spec.chunk = chunk_;
  spec.threads = threads_;
  spec.full_windows = true;
  spec.callback = AttentionTap::on_node;
  spec.callback_data = &tap_;
  context_ = make_context(*model_->handle(), spec);

  shapes_ = model_->layer_shapes();
  const auto layers = model_->layers();
  slots_.assign(static_cast<std::size_t>(layers.back().index) + 1, kNoSlot);
  for (std::size_t slot = 0; slot < layers.size(); ++slot) {
    slots_[static_cast<std::size_t>(layers[slot].index)] = slot;
  }
}

Engine::~Engine() = default;

void Engine::on_node(
    std::function<void(std::size_t layer, const AttentionNode&)> handler) {
  on_node_ = std::move(handler);
}

void Engine::on_statistics(
    AttentionStatistics::Kind kind,
    std::size_t last_queries,
    std::function<void(std::size_t layer, const AttentionStatistics&)>
        handler) {
  statistics_.kind = kind;
  statistics_.last_queries = last_queries;
  on_statistics_ = std::move(handler);
}

void Engine::on_blocks(
    std::function<void(std::size_t layer, const TensorView&, const TensorView&)>
        handler) {
  tap_.on_blocks([this, handler = std::move(handler)](const BlockNode& node) {
    const auto index = static_cast<std::size_t>(node.layer);
    const std::size_t slot = index < slots_.size() ? slots_[index] : kNoSlot;
    if (slot != kNoSlot) handler(slot, node.before, node.after);
  });
}

void Engine::check_cache(const SequenceCache& cache) const {
  bool same = cache.layers() == shapes_.size() && cache.options().batch == 1 &&
              cache.options().dtype == DType::kFloat16;
  for (std::size_t l = 0; same && l < shapes_.size(); ++l) {
    same = cache.layer_shape(l) == shapes_[l];
  }
  if (!same) {
    fail(
        ErrorKind::kMismatch,
        "the cache does not have the layers of " + model_->name());
  }
}

void Engine::step(
    SequenceCache& cache,
    std::span<const Token> tokens,
    Logits logits,
    Mode mode) {
  check_tokens("Engine::step", *model_, tokens, chunk_);
  check_cache(cache);
  logits_begin_ = logits_end_ = 0;
  cache.begin(
      tokens.size(), mode == Mode::kRehearse ? Pass::kRehearse : Pass::kRead);
  const Step step(*this, cache);
  const int code = decode(*context_, tokens, cache.offset(), logits);
  tap_.rethrow();
  check_decode("Engine::step", code);
  if (layers_done_ != shapes_.size()) {
    fail(
        ErrorKind::kRuntime,
        "attention ran in " + std::to_string(layers_done_) + " of " +
            std::to_string(shapes_.size()) + " layers");
  }
  if (mode == Mode::kCommit) {
    const Stopwatch stopwatch(eviction_seconds_);
    cache.commit();
  }
  if (mode == Mode::kRehearse) cache.commit();
  const LogitsRange range = LogitsRange::of(logits, tokens.size());
  logits_begin_ = range.begin;
  logits_end_ = range.end;
}

void Engine::evict(SequenceCache& cache, std::span<const Token> sequence) {
  if (sequence.size() != cache.offset()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "Engine::evict: " + std::to_string(sequence.size()) +
            " tokens for a cache of " + std::to_string(cache.offset()));
  }
  const Stopwatch stopwatch(eviction_seconds_);
  const double attention = attention_seconds_;
  rehearse(cache, sequence);
  attention_seconds_ = attention;  // counted here in full
  cache.evict();
}

void Engine::rehearse(SequenceCache& cache, std::span<const Token> sequence) {
  std::size_t done = sequence.size() - cache.unrehearsed();
  if (done == sequence.size()) return;
  // Most of a micro-batch is for what is read again.
  const std::size_t room = chunk_ / 4;
  std::vector<Token> cue = model_->tokenize(kCue, false, false);
  if (cue.size() > room) cue.clear();
  std::vector<Token> part;
  while (done < sequence.size()) {
    const std::size_t lead = std::min({kLeadTokens, done, room});
    part = cue;
    const auto before = sequence.subspan(done - lead, lead);
    part.insert(part.end(), before.begin(), before.end());
    const auto again = sequence.subspan(
        done, std::min(sequence.size() - done, chunk_ - part.size()));
    part.insert(part.end(), again.begin(), again.end());
    step(cache, part, Logits::kNone, Mode::kRehearse);
    done += again.size();
  }
}

// Rows are read by cell number, so a surprise here must not pass silently.
void Engine::check_cells(const AttentionNode& node, std::size_t window) {
  bool& checked = window == 0 ? global_cells_checked_ : windowed_cells_checked_;
  if (checked) return;
  checked = true;
  if (!sees_own_cells(node, window)) {
    fail(
        ErrorKind::kRuntime,
        "llama.cpp did not put token i into cell i (layer " +
            std::to_string(node.layer) + ")");
  }
}

AttentionStatistics* Engine::statistics_of(std::size_t slot) {
  const auto needs = cache_->attention_needs(slot);
  if (needs && on_statistics_) {
    fail(
        ErrorKind::kInvalidArgument,
        "policy " + std::string(cache_->policy().name()) +
            " needs the attention that on_statistics() asks for");
  }
  if (needs) {
    statistics_.kind = needs->kind;
    statistics_.last_queries = needs->last_queries;
  }
  return needs || on_statistics_ ? &statistics_ : nullptr;
}

void Engine::on_attention(const AttentionNode& node) {
  const auto index = static_cast<std::size_t>(node.layer);
  const std::size_t slot = index < slots_.size() ? slots_[index] : kNoSlot;
  if (cache_ == nullptr || slot == kNoSlot) {
    fail(
        ErrorKind::kRuntime,
        "unexpected attention in layer " + std::to_string(node.layer));
  }
  const AttentionLayer& layer = model_->layers()[slot];
  check_cells(node, layer.window);
  if (on_node_) on_node_(slot, node);

  const Stopwatch stopwatch(attention_seconds_);
  cache_->append(slot, node.new_keys, node.new_values);
  AttentionOptions options;
  options.scale = node.scale;
  options.soft_cap = node.soft_cap;
  options.window = layer.window;
  options.threads = threads_;
  attend(
      node.queries, cache_->rows(slot), options, node.out, statistics_of(slot));
  if (on_statistics_) on_statistics_(slot, statistics_);
  if (cache_->attention_needs(slot)) cache_->observe(slot, statistics_);
  ++layers_done_;
}

const float* Engine::logits(std::size_t i) const {
  return logits_at(
      "Engine::logits", *context_, {logits_begin_, logits_end_}, i);
}

std::size_t Engine::native_kv_bytes() const noexcept {
  return llama::native_kv_bytes(shapes_, chunk_);
}

std::size_t native_kv_bytes(
    std::span<const LayerShape> layers, std::size_t chunk) noexcept {
  std::size_t row_bytes = 0;
  for (const LayerShape& shape : layers) {
    row_bytes += shape.kv_heads * (shape.key_dim + shape.value_dim) *
                 size_of(DType::kFloat16);
  }
  return row_bytes * pad_cells(chunk);
}

}  // namespace qfilters::llama
