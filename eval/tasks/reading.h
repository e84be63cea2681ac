#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qfilters/snapshot.h"

#include "eval/run.h"
#include "eval/text.h"

namespace qfilters::eval {

/// What the sequences of a task have cost together.
struct Usage {
  llama::SessionStats stats;  ///< as add_stats() adds them
  std::size_t sessions = 0;
  std::size_t prefill_tokens = 0;
  std::size_t decode_tokens = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  /// One-shot only: the most bytes of the cache that a context was read with,
  /// and of the rows that were left of it.
  std::size_t kv_bytes_prefill = 0;
  std::optional<std::size_t> kv_bytes_compressed;
  double compression_seconds = 0;
};

/// Puts the costs into the record of a run.
void set_usage(RunRecord& record, const Usage& usage);

/// A question and the answer that is hoped for.
struct Inquiry {
  std::vector<Token> question;
  std::vector<Token> answer;  ///< teacher forced, for the loss
  std::vector<std::string> references;
  std::size_t generate = 0;  ///< most tokens of the greedy answer; 0: none
};

/// The tokens of question and answer, tokenized together, because some
/// vocabularies would otherwise put a space of their own before the answer;
/// where they merge over the border, the token belongs to the answer. Throws
/// Error kInvalidArgument when one of them has no token.
[[nodiscard]] Inquiry make_inquiry(
    const Codec& codec, std::string_view question, std::string_view answer);

/// Tokens that an inquiry adds to a sequence at most.
[[nodiscard]] std::size_t tokens_of(const Inquiry& inquiry) noexcept;

/// What came back.
struct Reply {
  std::string prediction;    ///< bytes; need not be whole UTF-8 characters
  double nll_per_token = 0;  ///< of the answer that was hoped for
  bool greedy = false;       ///< each of its tokens was the greedy choice
  double kept = 1;  ///< rows per head / tokens, when the question was read
};

/// Feeds tokens (1 or more) in chunks; returns the index of the last one's
/// logits.
std::size_t feed(llama::Session& session, std::span<const Token> tokens);

/// Opens a session that has read a context and nothing else; what that took
/// enters the usage.
using ContextOpener = std::function<std::unique_ptr<llama::Session>(Usage&)>;

/// Reads `context` in a session for `tokens` tokens. What is passed must
/// outlive the opener.
[[nodiscard]] ContextOpener streaming_opener(
    const SessionFactory& open,
    std::span<const Token> context,
    std::size_t tokens);

/// A context about which any number of questions are asked, each as if it were
/// the only one. Query-agnostic: a question enters in chunks of its own, when
/// the context has been read and evicted.
///
/// The context is opened once and its state saved; where a state cannot be
/// saved (llama.cpp's own cache) it is opened again for each answer.
class Reading {
 public:
  /// Codec and usage must outlive the object; the costs enter `usage` as they
  /// arise, the statistics of a session when it ends.
  Reading(ContextOpener open, const Codec& codec, Usage& usage);
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading();

  /// The loss of the answer that is hoped for, then the greedy answer, which
  /// ends at a token that ends answers, at inquiry.generate tokens or when it
  /// holds all references, so that more could not change its score.
  [[nodiscard]] Reply ask(const Inquiry& inquiry);

 private:
  void read();
  void rewind();
  void close();
  std::size_t feed_timed(std::span<const Token> tokens);
  void step_timed(Token token);
  bool force(const Inquiry& inquiry, Reply& reply);
  [[nodiscard]] std::string generate(const Inquiry& inquiry);

  ContextOpener open_;
  const Codec& codec_;
  Usage& usage_;
  std::unique_ptr<llama::Session> session_;
  std::optional<Snapshot> saved_;
  std::size_t kv_bytes_peak_ = 0;  // before the last rewind
  bool fresh_ = false;  // the session has read the context and nothing else
};

/// Those who are asked the same questions about the same contexts.
class Readers {
 public:
  using Ask = std::function<void(std::size_t reader, Reading& reading)>;

  Readers() = default;
  Readers(const Readers&) = delete;
  Readers& operator=(const Readers&) = delete;
  virtual ~Readers() = default;

  [[nodiscard]] virtual std::size_t count() const noexcept = 0;

  /// Calls `ask` for each reader in turn, with its reading of `context` in a
  /// sequence of up to `tokens` tokens.
  virtual void read(
      std::span<const Token> context, std::size_t tokens, const Ask& ask) = 0;

  /// What a reader has cost.
  [[nodiscard]] virtual const Usage& usage(std::size_t reader) const = 0;
};

/// One reader, with a session of its own for each context: protocol streaming.
class StreamingReader final : public Readers {
 public:
  /// The codec must outlive the object.
  StreamingReader(SessionFactory open, const Codec& codec)
      : open_(std::move(open)), codec_(codec) {}

  [[nodiscard]] std::size_t count() const noexcept override { return 1; }

  void read(std::span<const Token> context, std::size_t tokens, const Ask& ask)
      override;

  [[nodiscard]] const Usage& usage(std::size_t /*reader*/) const override {
    return usage_;
  }

 private:
  SessionFactory open_;
  const Codec& codec_;
  Usage usage_;
};

}  // namespace qfilters::eval
