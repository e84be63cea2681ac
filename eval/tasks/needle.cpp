#include "eval/tasks/needle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

namespace qfilters::eval {

namespace {

constexpr std::array<NeedlePhrasing, 6> kPhrasings{
    {{" The secret number of the lighthouse is {}. Remember it.",
      "\n\nQuestion: What is the secret number of the lighthouse?\n"
      "Answer: The secret number of the lighthouse is"},
     {" Anna's locker at the station opens with the code {}.",
      "\n\nQuestion: Which code opens Anna's locker at the station?\n"
      "Answer: Anna's locker at the station opens with the code"},
     {" By the way, the old piano was sold for {} crowns at the auction.",
      "\n\nQuestion: For how many crowns was the old piano sold?\n"
      "Answer: At the auction the old piano was sold for"},
     {" The bakery in Mill Street has the telephone extension {}.",
      "\n\nQuestion: What is the telephone extension of the bakery in Mill "
      "Street?\n"
      "Answer: The bakery in Mill Street has the telephone extension"},
     {" Captain Morel wrote {} as the weight of the cargo in the logbook.",
      "\n\nQuestion: What did Captain Morel write in the logbook as the weight "
      "of the cargo?\n"
      "Answer: In the logbook Captain Morel wrote"},
     {" The winning ticket of the village lottery was ticket {}.",
      "\n\nQuestion: Which ticket won the village lottery?\n"
      "Answer: The winning ticket of the village lottery was ticket"}}};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "needle: " + message);
}

bool is_key(std::string_view key) {
  return key.size() == 5 && std::all_of(key.begin(), key.end(), [](char c) {
           return c >= '0' && c <= '9';
         });
}

const NeedlePhrasing& phrasing_of(std::size_t number) {
  if (number < 1 || number > kPhrasings.size()) {
    refuse(
        "phrasing " + std::to_string(number) + " is not in 1.." +
        std::to_string(kPhrasings.size()));
  }
  return kPhrasings[number - 1];
}

std::string needle_sentence(std::string_view needle, std::string_view key) {
  std::string sentence(needle);
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

std::size_t size_of(const NeedlePrompt& prompt) {
  return prompt.context.size() + prompt.question.size() + prompt.answer.size() -
         1;
}

std::vector<NeedleCell> make_cells(const NeedleOptions& options) {
  std::vector<NeedleCell> cells;
  for (const std::size_t skip : options.skips) {
    for (const std::size_t length : options.lengths) {
      for (const double depth : options.depths) {
        for (const std::size_t phrasing : options.phrasings) {
          for (const std::string& key : options.keys) {
            cells.push_back({length, depth, key, phrasing, skip});
          }
        }
      }
    }
  }
  return cells;
}

}  // namespace

std::span<const NeedlePhrasing> needle_phrasings() noexcept {
  return kPhrasings;
}

NeedlePrompt make_needle_prompt(
    const Codec& codec,
    std::span<const Token> text,
    double depth,
    std::string_view key,
    std::size_t phrasing) {
  const NeedlePhrasing& words = phrasing_of(phrasing);
  NeedlePrompt prompt;
  const std::size_t place = needle_place(codec, text, depth);
  prompt.context = codec.prefix;
  append(prompt.context, text.first(place));
  append(prompt.context, codec.tokenize(needle_sentence(words.needle, key)));
  append(prompt.context, text.subspan(place));

  Inquiry inquiry = make_inquiry(codec, words.question, " " + std::string(key));
  prompt.question = std::move(inquiry.question);
  prompt.answer = std::move(inquiry.answer);
  return prompt;
}

void check_needle_options(const NeedleOptions& options) {
  if (options.lengths.empty() || options.depths.empty() ||
      options.keys.empty() || options.phrasings.empty() ||
      options.skips.empty()) {
    refuse("lengths, depths, keys, phrasings and skips must not be empty");
  }
  constexpr std::size_t kMost = kMostTokens / 2;  // their sum must fit too
  for (const std::size_t length : options.lengths) {
    if (length == 0) refuse("a length of 0 leaves no text");
    if (length > kMost) {
      refuse("a length of more than " + std::to_string(kMost));
    }
  }
  for (const std::size_t skip : options.skips) {
    if (skip > kMost) refuse("a skip of more than " + std::to_string(kMost));
  }
  for (const std::size_t number : options.phrasings) {
    static_cast<void>(phrasing_of(number));
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
  for (const std::size_t phrasing : options.phrasings) {
    for (const std::string& key : options.keys) {
      const NeedlePrompt prompt =
          make_needle_prompt(codec, {}, 0, key, phrasing);
      longest = std::max(longest, size_of(prompt));
    }
  }
  return longest +
         *std::max_element(options.lengths.begin(), options.lengths.end());
}

std::size_t needle_text_tokens(const NeedleOptions& options) {
  check_needle_options(options);
  return *std::max_element(options.lengths.begin(), options.lengths.end()) +
         *std::max_element(options.skips.begin(), options.skips.end());
}

std::vector<NeedleResult> run_needle(
    Readers& readers,
    const Codec& codec,
    std::span<const Token> text,
    const NeedleOptions& options,
    const Progress& progress) {
  const std::size_t needed = needle_text_tokens(options);
  if (text.size() < needed) {
    refuse(
        "the text has " + std::to_string(text.size()) + " tokens, but " +
        std::to_string(needed) + " are needed");
  }
  std::vector<NeedleResult> results(readers.count());
  for (NeedleResult& result : results) {
    result.cells = make_cells(options);
  }
  const std::size_t cells = results.front().cells.size();
  std::size_t done = 0;
  for (std::size_t c = 0; c < cells; ++c) {
    const NeedleCell& place = results.front().cells[c];
    const NeedlePrompt prompt = make_needle_prompt(
        codec,
        text.subspan(place.skip, place.length),
        place.depth,
        place.key,
        place.phrasing);
    const Inquiry inquiry{prompt.question, prompt.answer, {}, 0};
    const auto ask = [&](std::size_t reader, Reading& reading) {
      const Reply reply = reading.ask(inquiry);
      NeedleResult& result = results[reader];
      result.cells[c].hit = reply.greedy;
      result.cells[c].nll_per_token = reply.nll_per_token;
      result.accuracy += reply.greedy ? 1.0 : 0.0;
      result.mean_nll += reply.nll_per_token;
      ++done;
      if (progress) progress(done, cells * readers.count());
    };
    readers.read(prompt.context, size_of(prompt), ask);
  }
  for (NeedleResult& result : results) {
    result.accuracy /= static_cast<double>(cells);
    result.mean_nll /= static_cast<double>(cells);
  }
  return results;
}

}  // namespace qfilters::eval
