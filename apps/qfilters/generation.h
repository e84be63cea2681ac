#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llama/session.h"
#include "sampler.h"

namespace qfilters::cli {

struct GenerationOptions {
  std::size_t tokens = 256;  ///< most tokens of one answer
  SamplerOptions sampling;
  bool ignore_end = false;  ///< end tokens are never picked
  bool stop_at_trained_length = false;
};

/// Why an answer ended.
enum class Stop { kLength, kEnd, kInterrupted, kTrainedLength, kInputEnded };
[[nodiscard]] const char* to_string(Stop stop) noexcept;

struct Answer {
  Stop stop = Stop::kLength;
  std::string text;
};

/// Feeds a session and samples from it; counts tokens and time. An interrupt
/// (InterruptGuard) ends either between two steps. A token that was given out
/// last is pending: it enters the cache with what follows.
class Generation {
 public:
  /// Hears each piece of an answer as it comes.
  using Write = std::function<void(std::string_view piece)>;
  using Progress = std::function<void(std::size_t done, std::size_t total)>;

  Generation(llama::Session& session, const GenerationOptions& options);

  /// Whether so many more tokens stay within the trained length, or may pass.
  [[nodiscard]] bool has_room(std::size_t tokens) const noexcept;

  /// True while the sequence has no token.
  [[nodiscard]] bool empty() const noexcept {
    return session_.tokens().empty();
  }

  /// Puts tokens into the cache, a pending one first; false when interrupted.
  /// Warns once when positions pass the trained length.
  bool feed(std::span<const llama::Token> tokens, const Progress& progress);

  /// Samples an answer to what was fed last, or goes on with the last answer.
  [[nodiscard]] Answer answer(const Write& write);

  /// Whether save() can give the state: not after an interrupted feed().
  [[nodiscard]] bool can_save() const noexcept { return can_answer_; }

  /// The session and where the generation is: sampler, pending token, and
  /// without one the logits that the next token is picked from. Throws as
  /// Session::save(), kInvalidArgument unless can_save().
  [[nodiscard]] Snapshot save() const;

  /// Goes on where save() was called: the same tokens come as without it.
  /// `seed_given`: with another seed than the saved one the sampler starts
  /// anew from its own. Throws as Session::restore(); nothing changes then.
  void restore(const Snapshot& saved, bool seed_given);

  [[nodiscard]] std::size_t fed_tokens() const noexcept { return fed_; }

  [[nodiscard]] std::size_t decoded_tokens() const noexcept { return decoded_; }

  [[nodiscard]] std::size_t generated_tokens() const noexcept {
    return generated_;
  }

  [[nodiscard]] double feed_seconds() const noexcept { return feed_seconds_; }

  [[nodiscard]] double decode_seconds() const noexcept {
    return decode_seconds_;
  }

  /// From the first feed() to the first token; none before that.
  [[nodiscard]] std::optional<double> first_token_seconds() const noexcept {
    return first_token_seconds_;
  }

 private:
  [[nodiscard]] std::span<const float> next_logits() const;
  /// Picks the next token, after the pending one has entered the cache.
  [[nodiscard]] llama::Token next();
  void note_position();

  llama::Session& session_;
  GenerationOptions options_;
  Sampler sampler_;
  std::vector<llama::Token> pending_;  // none or one
  std::vector<float> saved_logits_;    // restored, until the next step
  bool can_answer_ = false;
  bool ended_ = false;         // the last answer ended by itself
  std::size_t last_ = 0;       // index of the last step's last token
  std::size_t fed_ = 0;        // tokens that feed() put into the cache
  std::size_t decoded_ = 0;    // tokens that answer() put into the cache
  std::size_t generated_ = 0;  // tokens given out
  bool warned_ = false;
  double feed_seconds_ = 0;
  double decode_seconds_ = 0;
  std::optional<double> first_token_seconds_;
};

}  // namespace qfilters::cli
