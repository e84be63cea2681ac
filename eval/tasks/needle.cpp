#include "eval/tasks/needle.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "qfilters/error.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

namespace {

constexpr std::string_view kNeedle =
    " The secret number of the lighthouse is {}. Remember it.";
constexpr std::string_view kQuestion =
    "\n\nQuestion: What is the secret number of the lighthouse?\n"
    "Answer: The secret number of the lighthouse is";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "needle: " + message);
}

bool is_key(std::string_view key) {
  return key.size() == 5 && std::all_of(key.begin(), key.end(), [](char c) {
           return c >= '0' && c <= '9';
         });
}

std::string needle_sentence(std::string_view key) {
  std::string sentence(kNeedle);
  return sentence.replace(sentence.find("{}"), 2, key);
}

/// A sentence may end inside a token, so the texts around a place are asked,
/// not token ids.
bool ends_sentence(const std::string& before, const std::string& after) {
  if (before.empty() || after.empty()) return false;
  const char stop = before.back();
  return (stop == '.' || stop == '!' || stop == '?') &&
         (after.front() == ' ' || after.front() == '\n');
}

/// Index of the token before which the needle goes.
std::size_t needle_place(
    const Codec& codec, std::span<const Token> text, double depth) {
  const double wanted = depth / 100.0 * static_cast<double>(text.size());
  const auto exact = static_cast<std::size_t>(std::llround(wanted));
  if (exact == 0 || exact >= text.size()) return std::min(exact, text.size());
  const auto fits = [&](std::size_t i) {
    return i > 0 && i < text.size() &&
           ends_sentence(codec.piece(text[i - 1]), codec.piece(text[i]));
  };
  for (std::size_t away = 0; away < text.size(); ++away) {
    if (away <= exact && fits(exact - away)) return exact - away;
    if (fits(exact + away)) return exact + away;
  }
  return exact;  // no sentence ends anywhere
}

void append(std::vector<Token>& to, std::span<const Token> tokens) {
  to.insert(to.end(), tokens.begin(), tokens.end());
}

/// Feeds tokens in chunks; logits of the last token remain.
std::size_t feed(llama::Session& session, std::span<const Token> tokens) {
  std::size_t last = 0;
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(session.chunk(), tokens.size() - done);
    const bool end = done + count == tokens.size();
    session.step(
        tokens.subspan(done, count),
        end ? llama::Logits::kLast : llama::Logits::kNone);
    last = count - 1;
    done += count;
  }
  return last;
}

/// Runs one cell. After a wrong choice the loss of the rest still counts.
void run_cell(
    llama::Session& session,
    const NeedlePrompt& prompt,
    std::size_t vocabulary,
    NeedleCell& cell,
    NeedleResult& result) {
  std::size_t last = 0;
  timed(result.prefill_seconds, [&] {
    feed(session, prompt.context);
    last = feed(session, prompt.question);
  });
  cell.hit = true;
  double nll = 0;
  for (std::size_t i = 0; i < prompt.answer.size(); ++i) {
    const Token token = prompt.answer[i];
    const std::span<const float> logits(session.logits(last), vocabulary);
    nll += negative_log_likelihood(logits, token);
    cell.hit = cell.hit && greedy_choice(logits) == token;
    if (i + 1 == prompt.answer.size()) break;
    timed(result.decode_seconds, [&] {
      session.step({&token, 1}, llama::Logits::kLast);
    });
    last = 0;
  }
  cell.nll_per_token = nll / static_cast<double>(prompt.answer.size());
  result.prefill_tokens += prompt.context.size() + prompt.question.size();
  result.decode_tokens += prompt.answer.size() - 1;
}

std::size_t size_of(const NeedlePrompt& prompt) {
  return prompt.context.size() + prompt.question.size() + prompt.answer.size() -
         1;
}

}  // namespace

NeedlePrompt make_needle_prompt(
    const Codec& codec,
    std::span<const Token> text,
    double depth,
    std::string_view key) {
  NeedlePrompt prompt;
  const std::size_t place = needle_place(codec, text, depth);
  prompt.context = codec.prefix;
  append(prompt.context, text.first(place));
  append(prompt.context, codec.tokenize(needle_sentence(key)));
  append(prompt.context, text.subspan(place));

  // Tokenized together: some vocabularies would otherwise put a space of
  // their own before the key.
  const std::string question(kQuestion);
  const std::vector<Token> alone = codec.tokenize(question);
  const std::vector<Token> both =
      codec.tokenize(question + " " + std::string(key));
  const auto split =
      std::mismatch(both.begin(), both.end(), alone.begin(), alone.end()).first;
  prompt.question.assign(both.begin(), split);
  prompt.answer.assign(split, both.end());
  if (prompt.question.empty() || prompt.answer.empty()) {
    refuse("the vocabulary has no tokens for the question or the key");
  }
  return prompt;
}

void check_needle_options(const NeedleOptions& options) {
  if (options.lengths.empty() || options.depths.empty() ||
      options.keys.empty()) {
    refuse("lengths, depths and keys must not be empty");
  }
  for (const std::size_t length : options.lengths) {
    if (length == 0) refuse("a length of 0 leaves no text");
  }
  for (const double depth : options.depths) {
    if (!(depth >= 0 && depth <= 100)) {
      refuse("depth " + std::to_string(depth) + " is not in 0..100 percent");
    }
  }
  for (const std::string& key : options.keys) {
    if (!is_key(key)) refuse("key '" + key + "' is not five digits");
  }
}

std::size_t needle_tokens(const Codec& codec, const NeedleOptions& options) {
  check_needle_options(options);
  std::size_t longest = 0;
  for (const std::string& key : options.keys) {
    longest = std::max(longest, size_of(make_needle_prompt(codec, {}, 0, key)));
  }
  return longest +
         *std::max_element(options.lengths.begin(), options.lengths.end());
}

NeedleResult run_needle(
    const SessionFactory& open,
    const Codec& codec,
    std::span<const Token> text,
    const NeedleOptions& options,
    const Progress& progress) {
  check_needle_options(options);
  const std::size_t needed =
      *std::max_element(options.lengths.begin(), options.lengths.end());
  if (text.size() < needed) {
    refuse(
        "the text has " + std::to_string(text.size()) + " tokens, but " +
        std::to_string(needed) + " are needed");
  }
  NeedleResult result;
  const std::size_t total =
      options.lengths.size() * options.depths.size() * options.keys.size();
  std::size_t hits = 0;
  for (const std::size_t length : options.lengths) {
    for (const double depth : options.depths) {
      for (const std::string& key : options.keys) {
        NeedleCell cell{length, depth, key};
        const NeedlePrompt prompt =
            make_needle_prompt(codec, text.first(length), depth, key);
        const std::unique_ptr<llama::Session> session = open(size_of(prompt));
        run_cell(*session, prompt, codec.vocabulary, cell, result);
        add_stats(result.stats, session->stats(), result.cells.empty());
        hits += cell.hit ? 1U : 0U;
        result.mean_nll += cell.nll_per_token;
        result.cells.push_back(cell);
        if (progress) progress(result.cells.size(), total);
      }
    }
  }
  result.accuracy = static_cast<double>(hits) / static_cast<double>(total);
  result.mean_nll /= static_cast<double>(total);
  return result;
}

}  // namespace qfilters::eval
