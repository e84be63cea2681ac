#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"

#include "llama/attention_tap.h"
#include "llama/handles.h"
#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::llama {

/// Bytes of llama.cpp's own cache in an Engine: the cells of one micro-batch,
/// padded as llama.cpp pads them (256), for every layer.
[[nodiscard]] std::size_t native_kv_bytes(
    std::span<const LayerShape> layers, std::size_t chunk) noexcept;

/// Drives a llama.cpp context of one micro-batch whose attention nodes read a
/// SequenceCache instead of llama.cpp's cache. Owns the context and the tap;
/// knows no policy. One sequence at a time, any number in turn.
class Engine {
 public:
  /// Throws Error kInvalidArgument for options out of range, kRuntime when
  /// llama.cpp cannot create the context.
  Engine(std::shared_ptr<const Model> model, const SessionOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  enum class Mode {
    kCommit,    ///< the micro-batch enters the cache
    kProbe,     ///< the cache is left as it was; logits are valid all the same
    kRehearse,  ///< Pass::kRehearse: for a policy that rehearses
  };

  /// Runs one micro-batch (1 to chunk tokens) at position cache.offset().
  /// After the decode either all layers commit or all roll back. Throws Error
  /// kRuntime when llama.cpp fails, kInvalidArgument for a bad token count or
  /// a token outside the vocabulary, kMismatch when the cache's layers are not
  /// the model's, and what the cache throws; the cache is unchanged then.
  void step(
      SequenceCache& cache,
      std::span<const Token> tokens,
      Logits logits,
      Mode mode = Mode::kCommit);

  /// Evicts down to the budget now, between two steps. With a policy that
  /// rehearses all tokens since the last time are read again before, in
  /// micro-batches of up to chunk() tokens behind the sequence, each led in by
  /// the cue and the tokens before it. `sequence`: all tokens in the cache.
  /// Logits are no longer valid. Throws Error kInvalidArgument for another
  /// number of tokens, and as step(); no row has changed or gone then, and it
  /// can be asked again.
  void evict(SequenceCache& cache, std::span<const Token> sequence);

  /// Called with every attention node before its rows enter the cache
  /// (calibration, capture); `layer` counts the model's layers(). The node's
  /// data is valid during the call only. What it throws fails the step.
  void on_node(
      std::function<void(std::size_t layer, const AttentionNode&)> handler);

  /// Called after every attention node with what attend() collected there;
  /// `kind` and `last_queries` as in AttentionStatistics. What it throws fails
  /// the step, and so does a cache whose policy looks at attention itself
  /// (Error kInvalidArgument).
  void on_statistics(
      AttentionStatistics::Kind kind,
      std::size_t last_queries,
      std::function<void(std::size_t layer, const AttentionStatistics&)>
          handler);

  /// Called with the residual stream around every attention block whose graph
  /// shows it (calibration; see AttentionTap): in the last layer only for
  /// tokens with logits. What it throws fails the step.
  void on_blocks(
      std::function<void(
          std::size_t layer, const TensorView& before, const TensorView& after)>
          handler);

  /// Logits of token i of the last step that succeeded, valid until the next.
  /// Throws Error kInvalidArgument when that step did not ask for them.
  [[nodiscard]] const float* logits(std::size_t i) const;

  [[nodiscard]] const Model& model() const noexcept { return *model_; }

  [[nodiscard]] std::size_t chunk() const noexcept { return chunk_; }

  /// Scoring and attention of what enters the cache or is probed.
  [[nodiscard]] double attention_seconds() const noexcept {
    return attention_seconds_;
  }

  /// Commits and evict(), second readings in full (model and attention).
  [[nodiscard]] double eviction_seconds() const noexcept {
    return eviction_seconds_;
  }

  /// Bytes of llama.cpp's own cache: one micro-batch, padded.
  [[nodiscard]] std::size_t native_kv_bytes() const noexcept;

 private:
  class Step;

  void check_cache(const SequenceCache& cache) const;
  void rehearse(SequenceCache& cache, std::span<const Token> sequence);
  void on_attention(const AttentionNode& node);
  void check_cells(const AttentionNode& node, std::size_t window);
  /// What attend() is to collect at this layer, if anything.
  [[nodiscard]] AttentionStatistics* statistics_of(std::size_t slot);

  std::shared_ptr<const Model> model_;
  std::size_t chunk_ = 0;
  int threads_ = 1;
  AttentionTap tap_;
  ContextHandle context_;  // calls tap_
  std::vector<LayerShape> shapes_;
  std::vector<std::size_t> slots_;  // by layer number: place in layers()
  std::function<void(std::size_t, const AttentionNode&)> on_node_;
  AttentionStatistics statistics_;
  std::function<void(std::size_t, const AttentionStatistics&)> on_statistics_;

  // Of the step in progress.
  SequenceCache* cache_ = nullptr;
  std::size_t layers_done_ = 0;
  bool global_cells_checked_ = false;
  bool windowed_cells_checked_ = false;

  // Of the last step.
  std::size_t logits_begin_ = 0;
  std::size_t logits_end_ = 0;

  double attention_seconds_ = 0;
  double eviction_seconds_ = 0;
};

}  // namespace qfilters::llama
