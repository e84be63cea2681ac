#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "generation.h"
#include "llama/model.h"

namespace qfilters::cli {

/// The text form of a conversation, from the model's own template, and what
/// of it is in the cache already. Each turn feeds only what is new.
class Conversation {
 public:
  explicit Conversation(const llama::Model& model) : model_(model) {}

  /// Adds the user's message; returns the tokens to feed: what the cache lacks
  /// of the conversation up to the opening of the answer. The end of the
  /// previous answer is part of it, so that every turn is well-formed. Throws
  /// Error kUnsupported when the template rewrites earlier turns.
  /// `bos`: they begin a sequence.
  [[nodiscard]] std::vector<llama::Token> ask(std::string message, bool bos);

  /// Adds the model's answer to the last message.
  void add_answer(std::string text);

  /// Adds the messages to a snapshot.
  void save(Snapshot& snapshot) const;
  /// Goes on with the conversation of a snapshot, a new one where it has none.
  /// Throws Error kFile when the messages do not alternate.
  void restore(const Snapshot& snapshot);

 private:
  [[nodiscard]] std::string_view new_part(std::string_view rendered) const;

  const llama::Model& model_;
  std::vector<llama::Model::ChatMessage> messages_;
  std::string opened_;  // as rendered for the last answer
  std::string answer_;  // that answer, word for word
};

struct ChatResult {
  Stop stop = Stop::kInputEnded;
  bool cut = false;  ///< interrupted before the last message was answered
  std::size_t turns = 0;
};

/// Reads a message per line from stdin until it ends and answers each. Empty
/// lines are skipped. `write` gets the answers, a line break after each;
/// `progress` follows prefills; `turn_done` is called after each answer.
[[nodiscard]] ChatResult run_chat(
    Generation& generation,
    Conversation& conversation,
    const Generation::Write& write,
    const Generation::Progress& progress,
    const std::function<void()>& turn_done);

}  // namespace qfilters::cli
