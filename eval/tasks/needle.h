#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/run.h"
#include "eval/tasks/reading.h"
#include "eval/text.h"

namespace qfilters::eval {

/// A fact to hide and the question about it, each with another subject; the
/// key stands where the needle says {}, and after the question.
struct NeedlePhrasing {
  std::string_view needle;
  std::string_view question;
};

/// The built-in ones; options count them from 1.
[[nodiscard]] std::span<const NeedlePhrasing> needle_phrasings() noexcept;

struct NeedleOptions {
  std::vector<std::size_t> lengths{2048};  ///< tokens of text around the needle
  std::vector<double> depths{20, 60};      ///< percent of the text before it
  std::vector<std::string> keys{"58291", "40716"};  ///< five digits each
  std::vector<std::size_t> phrasings{1};            ///< see needle_phrasings()
  std::vector<std::size_t> skips{0};  ///< each haystack begins at this token
};

/// One key hidden at one depth of one haystack.
struct NeedleCell {
  std::size_t length = 0;
  double depth = 0;
  std::string key;
  std::size_t phrasing = 1;
  std::size_t skip = 0;
  bool hit = false;          ///< every answer token was the greedy choice
  double nll_per_token = 0;  ///< mean over the answer tokens
};

struct NeedleResult {
  std::vector<NeedleCell> cells;
  double accuracy = 0;  ///< share of hits
  double mean_nll = 0;  ///< mean of the cells' nll_per_token
};

/// A haystack ready to run.
struct NeedlePrompt {
  std::vector<Token> context;   ///< prefix, text and needle
  std::vector<Token> question;  ///< enters when the context is in the cache
  std::vector<Token> answer;    ///< teacher forced
};

/// Hides the needle sentence at the end of the sentence that is nearest to
/// depth percent of `text`; at 0 it comes first, at 100 last.
[[nodiscard]] NeedlePrompt make_needle_prompt(
    const Codec& codec,
    std::span<const Token> text,
    double depth,
    std::string_view key,
    std::size_t phrasing = 1);

/// Tokens of the longest sequence that the options lead to.
[[nodiscard]] std::size_t needle_tokens(
    const Codec& codec, const NeedleOptions& options);

/// Tokens of text that the options need: the furthest skip and the longest
/// haystack.
[[nodiscard]] std::size_t needle_text_tokens(const NeedleOptions& options);

/// Throws Error kInvalidArgument for an empty list, a length of 0, a depth
/// outside 0..100, a key that is not five digits, an unknown phrasing, or a
/// length or skip beyond the positions that there are.
void check_needle_options(const NeedleOptions& options);

/// Can a fact be recalled after eviction? Query-agnostic: the question enters
/// in chunks of its own, after the context was evicted; then the answer goes
/// token by token. Each cell has a context of its own; cells go through texts,
/// lengths, depths, phrasings and keys, keys fastest. One result a reader.
/// `text` needs needle_text_tokens(), else Error kInvalidArgument.
[[nodiscard]] std::vector<NeedleResult> run_needle(
    Readers& readers,
    const Codec& codec,
    std::span<const Token> text,
    const NeedleOptions& options,
    const Progress& progress = {});

}  // namespace qfilters::eval
