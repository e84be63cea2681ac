#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <llama.h>

#include "qfilters/error.h"

#include "llama/runtime.h"
#include "llama/session.h"

namespace qfilters::llama {
namespace {

constexpr const char* kStep = "baseline step";

[[noreturn]] void fail(const std::string& reason) {
  throw Error(ErrorKind::kInvalidArgument, "make_baseline_session: " + reason);
}

ggml_type parse_cache_type(const std::string& name) {
  if (name == "f16") return GGML_TYPE_F16;
  if (name == "bf16") return GGML_TYPE_BF16;
  if (name == "q8_0") return GGML_TYPE_Q8_0;
  fail("cache_type='" + name + "' is none of f16, bf16, q8_0");
}

ContextSpec make_spec(
    const SessionOptions& options, const BaselineOptions& baseline) {
  constexpr std::size_t kMaxContext = std::numeric_limits<int>::max() / 2;
  check_options("make_baseline_session", options);
  if (baseline.context < 1 || baseline.context > kMaxContext) {
    fail(
        "context=" + std::to_string(baseline.context) + " is not in [1, " +
        std::to_string(kMaxContext) + "]");
  }
  ContextSpec spec;
  spec.cells = std::max(baseline.context, options.chunk);
  spec.chunk = options.chunk;
  spec.threads = options.threads;
  spec.flash_attention = baseline.flash_attention;
  spec.cache_type = parse_cache_type(baseline.cache_type);
  if (ggml_is_quantized(spec.cache_type) && !spec.flash_attention) {
    fail("cache_type=q8_0 needs flash_attention: llama.cpp says so");
  }
  return spec;
}

class BaselineSession final : public Session {
 public:
  BaselineSession(
      std::shared_ptr<const Model> model,
      const SessionOptions& options,
      const BaselineOptions& baseline)
      : model_(std::move(model)),
        spec_(make_spec(options, baseline)),
        context_(make_context(*model_->handle(), spec_)) {}

  [[nodiscard]] const float* logits(std::size_t i) const override {
    return logits_at("baseline logits", *context_, range_, i);
  }

  [[nodiscard]] std::size_t chunk() const noexcept override {
    return spec_.chunk;
  }

  [[nodiscard]] SessionStats stats() const override;

  [[nodiscard]] const Model& model() const noexcept override { return *model_; }

 protected:
  void run(std::span<const Token> tokens, Logits logits) override;

 private:
  [[nodiscard]] std::size_t cache_bytes() const noexcept;

  std::shared_ptr<const Model> model_;
  ContextSpec spec_;
  ContextHandle context_;
  std::size_t position_ = 0;
  LogitsRange range_;
};

void BaselineSession::run(std::span<const Token> tokens, Logits logits) {
  check_tokens(kStep, *model_, tokens, spec_.chunk);
  const std::size_t cells = llama_n_ctx(context_.get());
  if (position_ + tokens.size() > cells) {
    throw Error(
        ErrorKind::kMemoryLimit,
        std::string(kStep) + ": " + std::to_string(position_) + " + " +
            std::to_string(tokens.size()) + " tokens exceed the context of " +
            std::to_string(cells));
  }
  range_ = {};
  const auto forget = [&] {
    llama_memory_seq_rm(
        llama_get_memory(context_.get()),
        /*seq_id=*/0,
        static_cast<llama_pos>(position_),
        -1);
  };
  try {
    check_decode(kStep, decode(*context_, tokens, position_, logits));
  } catch (...) {
    forget();
    throw;
  }
  position_ += tokens.size();
  range_ = LogitsRange::of(logits, tokens.size());
}

// What the cache tensors take: allocated as a whole, from the start.
std::size_t BaselineSession::cache_bytes() const noexcept {
  std::size_t widest_value = 0;
  for (const AttentionLayer& layer : model_->layers()) {
    widest_value = std::max(widest_value, layer.kv_heads * layer.value_dim);
  }
  const std::size_t cells = llama_n_ctx(context_.get());
  std::size_t bytes = 0;
  for (const AttentionLayer& layer : model_->layers()) {
    const std::size_t key = layer.kv_heads * layer.key_dim;
    // Without flash attention values are stored transposed, all equally wide.
    const std::size_t value =
        spec_.flash_attention ? layer.kv_heads * layer.value_dim : widest_value;
    const std::size_t layer_cells =
        layer.window == 0
            ? cells
            : pad_cells(std::min(cells, layer.window + spec_.chunk));
    bytes +=
        layer_cells *
        (ggml_row_size(spec_.cache_type, static_cast<std::int64_t>(key)) +
         ggml_row_size(spec_.cache_type, static_cast<std::int64_t>(value)));
  }
  return bytes;
}

SessionStats BaselineSession::stats() const {
  std::size_t row_bytes = 0;
  for (const AttentionLayer& layer : model_->layers()) {
    row_bytes += layer.kv_heads * (layer.key_dim + layer.value_dim) *
                 size_of(DType::kFloat16);
  }
  SessionStats stats;
  stats.tokens = position_;
  stats.kv_bytes_peak = cache_bytes();
  stats.kv_bytes_full = position_ * row_bytes;
  stats.rows_mean = static_cast<double>(position_);
  stats.rows_min = position_;
  stats.rows_max = position_;
  return stats;
}

}  // namespace

std::unique_ptr<Session> make_baseline_session(
    std::shared_ptr<const Model> model,
    const SessionOptions& options,
    const BaselineOptions& baseline) {
  if (model == nullptr) fail("no model");
  return std::make_unique<BaselineSession>(std::move(model), options, baseline);
}

}  // namespace qfilters::llama
