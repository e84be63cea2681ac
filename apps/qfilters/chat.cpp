#include "chat.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include <unistd.h>

#include "qfilters/error.h"

#include "interrupt.h"

namespace qfilters::cli {

namespace {

/// The next line of stdin without its end; none at the end of input or when a
/// signal came. (std::getline would go on reading after a signal.)
std::optional<std::string> read_line() {
  if (isatty(STDIN_FILENO) == 1) {
    std::fputs("> ", stderr);
    std::fflush(stderr);
  }
  char* buffer = nullptr;
  std::size_t capacity = 0;
  const ssize_t length = ::getline(&buffer, &capacity, stdin);
  std::optional<std::string> line;
  if (length >= 0) line.emplace(buffer, static_cast<std::size_t>(length));
  std::free(buffer);
  if (InterruptGuard::signal() != 0) return std::nullopt;
  while (line && !line->empty() &&
         (line->back() == '\n' || line->back() == '\r')) {
    line->pop_back();
  }
  return line;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// The part of a snapshot that holds message i; they alternate.
std::string part_of(std::size_t i) {
  return "message " + std::to_string(i);
}

}  // namespace

// What follows the last answer in `rendered`. A template may trim an answer;
// the cache then keeps what was really said.
std::string_view Conversation::new_part(std::string_view rendered) const {
  if (rendered.starts_with(opened_)) {
    if (rendered.substr(opened_.size()).starts_with(answer_)) {
      return rendered.substr(opened_.size() + answer_.size());
    }
    const std::string_view trimmed = trim(answer_);
    const std::size_t found = rendered.find(trimmed, opened_.size());
    if (found != std::string_view::npos) {
      return rendered.substr(found + trimmed.size());
    }
  }
  throw Error(
      ErrorKind::kUnsupported,
      "chat: the template of " + model_.name() +
          " rewrites earlier turns; the cache cannot follow");
}

std::vector<llama::Token> Conversation::ask(std::string message, bool bos) {
  messages_.push_back({"user", std::move(message)});
  std::string rendered = model_.chat_prompt(messages_, true);
  std::vector<llama::Token> tokens =
      model_.tokenize(new_part(rendered), bos, true);
  opened_ = std::move(rendered);
  answer_.clear();
  return tokens;
}

void Conversation::add_answer(std::string text) {
  messages_.push_back({"assistant", text});
  answer_ = std::move(text);
}

void Conversation::save(Snapshot& snapshot) const {
  // A message that found no room has no answer and is not in the cache.
  for (std::size_t i = 0; i < messages_.size() / 2 * 2; ++i) {
    snapshot.put_text(part_of(i), messages_[i].content);
  }
}

void Conversation::restore(const Snapshot& snapshot) {
  std::vector<llama::Model::ChatMessage> messages;
  for (std::size_t i = 0; snapshot.has(part_of(i)); ++i) {
    messages.push_back(
        {i % 2 == 0 ? "user" : "assistant", snapshot.text(part_of(i))});
  }
  if (messages.size() % 2 != 0) {
    throw Error(ErrorKind::kFile, "chat: the last saved answer is missing");
  }
  messages_ = std::move(messages);
  if (messages_.empty()) return;
  opened_ = model_.chat_prompt(
      std::span(messages_).first(messages_.size() - 1), true);
  answer_ = messages_.back().content;
}

ChatResult run_chat(
    Generation& generation,
    Conversation& conversation,
    const Generation::Write& write,
    const Generation::Progress& progress,
    const std::function<void()>& turn_done) {
  ChatResult result;
  while (std::optional<std::string> message = read_line()) {
    if (message->empty()) continue;
    const std::vector<llama::Token> tokens =
        conversation.ask(std::move(*message), generation.empty());
    if (!generation.has_room(tokens.size())) {
      result.stop = Stop::kTrainedLength;
      return result;
    }
    ++result.turns;
    if (!generation.feed(tokens, progress)) {
      result.cut = true;
      break;
    }
    Answer answer = generation.answer(write);
    write("\n");
    result.stop = answer.stop;
    conversation.add_answer(std::move(answer.text));
    turn_done();
    if (answer.stop == Stop::kInterrupted) return result;
    if (answer.stop == Stop::kTrainedLength) return result;
  }
  result.stop =
      InterruptGuard::signal() != 0 ? Stop::kInterrupted : Stop::kInputEnded;
  return result;
}

}  // namespace qfilters::cli
