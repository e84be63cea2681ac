#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/snapshot.h"

#include "llama/model.h"

namespace qfilters::llama {

/// For which tokens of a step logits are computed.
enum class Logits { kNone, kLast, kAll };

/// Where the time and the memory of a session went.
struct SessionStats {
  std::size_t tokens = 0;         ///< tokens seen = position of the next one
  double attention_seconds = 0;   ///< of the first reading, with scoring
  double eviction_seconds = 0;    ///< second readings are part of eviction
  std::size_t kv_bytes_peak = 0;  ///< stored rows and llama.cpp's own cache
  std::size_t kv_bytes_full = 0;  ///< if every row were kept
  double rows_mean = 0;           ///< rows per global head
  std::size_t rows_min = 0;
  std::size_t rows_max = 0;
  /// Rows that each KV head of each layer holds now; empty for llama.cpp's own
  /// cache.
  std::vector<std::vector<std::size_t>> rows_by_head;
  std::uint64_t evictions = 0;
};

/// What a cache alone knows of them: no seconds, its own bytes. O(heads).
[[nodiscard]] SessionStats stats_of(const SequenceCache& cache);

/// A model at work on one sequence, whatever holds its KV cache. The evaluation
/// and the command line know policies only through this interface.
class Session {
 public:
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  virtual ~Session() = default;

  /// Runs up to chunk() tokens at the next positions. All or nothing: on an
  /// error the sequence is as before. Throws Error kRuntime, kInvalidArgument
  /// for no tokens or more than chunk(), and what the cache throws.
  void step(std::span<const Token> tokens, Logits logits);

  /// Does now what otherwise begins the next step: a policy that rehearses
  /// reads a second time and evicts once rows exceed its budget by the
  /// interval. Without such a policy, or before that, it does nothing. Logits
  /// of the last step are then gone. Throws as step(); the sequence is as
  /// before then.
  virtual void settle() {}

  /// All tokens of the sequence, in order.
  [[nodiscard]] std::span<const Token> tokens() const noexcept {
    return tokens_;
  }

  /// The whole sequence between two steps: every layer's cache, the tokens and
  /// whose they are. Throws Error kUnsupported for llama.cpp's own cache.
  [[nodiscard]] Snapshot save() const;

  /// Continues a saved sequence, bit for bit, with the same model file and
  /// policy; chunk and threads may differ. Logits are not part of it. Throws
  /// Error kMismatch naming what differs, kFile for damaged data, kMemoryLimit;
  /// the sequence is as before then.
  void restore(const Snapshot& saved);

  /// Throws as restore() does for what belongs to another model file.
  void check_model(const Snapshot& saved) const;

  /// Logits [vocabulary] of token i of the last step, valid until the next or
  /// settle(). With Logits::kLast only i = tokens - 1 exists.
  [[nodiscard]] virtual const float* logits(std::size_t i) const = 0;

  [[nodiscard]] virtual std::size_t chunk() const noexcept = 0;
  [[nodiscard]] virtual SessionStats stats() const = 0;
  [[nodiscard]] virtual const Model& model() const noexcept = 0;

  /// Runs any number of tokens in chunks; logits for the last one only.
  /// `progress`, if set, hears the number of tokens done after each chunk and
  /// stops the prefill by returning false. Returns tokens done.
  std::size_t prefill(
      std::span<const Token> tokens,
      const std::function<bool(std::size_t done)>& progress = {});

 protected:
  /// step() without the bookkeeping.
  virtual void run(std::span<const Token> tokens, Logits logits) = 0;

  [[nodiscard]] virtual Snapshot save_cache() const;
  /// Takes over a cache of exactly `tokens` tokens.
  virtual void restore_cache(const Snapshot& saved, std::size_t tokens);

 private:
  std::vector<Token> tokens_;
};

/// What save() gives after a session of `model` has read `tokens` and holds
/// `cache`, which came about elsewhere. Throws Error kInvalidArgument for a
/// cache of another number of tokens, and as SequenceCache::save().
[[nodiscard]] Snapshot session_state(
    const Model& model,
    const SequenceCache& cache,
    std::span<const Token> tokens);

struct SessionOptions {
  std::size_t chunk = 256;  ///< tokens per micro-batch
  int threads = 1;
  std::size_t byte_limit = 0;           ///< of stored rows, 0 = none
  RowFormat format = RowFormat::kSame;  ///< our cache only
};

/// Our cache and our attention inside llama.cpp (Engine + SequenceCache).
[[nodiscard]] std::unique_ptr<Session> make_engine_session(
    std::shared_ptr<const Model> model,
    Policy policy,
    const SessionOptions& options);

/// llama.cpp's own cache and attention: the outside baseline.
struct BaselineOptions {
  std::size_t context = 4096;  ///< tokens the cache must hold
  bool flash_attention = false;
  std::string cache_type = "f16";  ///< f16, bf16 or q8_0
};

[[nodiscard]] std::unique_ptr<Session> make_baseline_session(
    std::shared_ptr<const Model> model,
    const SessionOptions& options,
    const BaselineOptions& baseline);

}  // namespace qfilters::llama
