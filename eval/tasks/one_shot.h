#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "eval/replay.h"
#include "eval/run.h"
#include "eval/tasks/reading.h"
#include "eval/text.h"
#include "llama/capture.h"
#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::eval {

/// A context that was read once, with the full cache, and is compressed for
/// each contender: protocol one-shot. Compressing needs no model, but for a
/// policy that rehearses, which reads the context once more. `llama` cannot be
/// compressed and reads for itself, with its own cache.
class OneShotContext {
 public:
  /// Reads `context` in a sequence of up to `tokens` tokens, with queries as
  /// far as a contender's policy looks at attention, in micro-batches and on
  /// threads of the last contender but for `llama`. Model, contenders and
  /// context must outlive the object. `progress` hears tokens read. Throws
  /// Error kInvalidArgument for an empty context, and as make_policy() and
  /// llama::capture() do.
  OneShotContext(
      std::shared_ptr<const llama::Model> model,
      std::span<const Contender> contenders,
      std::span<const Token> context,
      std::size_t tokens,
      const std::function<void(std::size_t done)>& progress = {});

  /// A session that has read the context and holds what the contender keeps of
  /// it; nothing more goes from there. The reading counts for each contender as
  /// if it were its own.
  [[nodiscard]] std::unique_ptr<llama::Session> open(
      std::size_t contender, Usage& usage);

 private:
  std::shared_ptr<const llama::Model> model_;
  std::span<const Contender> contenders_;
  std::span<const Token> context_;
  std::size_t tokens_;
  double seconds_ = 0;
  std::vector<std::optional<Policy>> policies_;  // none for llama
  std::optional<llama::Capture> capture_;
  std::optional<Replay> replay_;
};

/// All contenders, asked about contexts that are read once for all of them.
class OneShotReaders final : public Readers {
 public:
  /// Codec and contenders must outlive the object.
  OneShotReaders(
      std::shared_ptr<const llama::Model> model,
      std::span<const Contender> contenders,
      const Codec& codec);

  [[nodiscard]] std::size_t count() const noexcept override {
    return contenders_.size();
  }

  void read(std::span<const Token> context, std::size_t tokens, const Ask& ask)
      override;

  [[nodiscard]] const Usage& usage(std::size_t reader) const override {
    return usage_[reader];
  }

 private:
  std::shared_ptr<const llama::Model> model_;
  std::span<const Contender> contenders_;
  const Codec& codec_;
  std::vector<Usage> usage_;
};

}  // namespace qfilters::eval
