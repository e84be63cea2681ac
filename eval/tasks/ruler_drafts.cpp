#include "eval/tasks/ruler_drafts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace qfilters::eval {

namespace {

constexpr std::size_t kEndless = std::size_t{1} << 31U;
constexpr std::string_view kNoiseText =
    "Rain fell on the roof. A cart rolled down the lane. Nobody looked up. "
    "The clock struck and the day went on. ";

using Unit = std::function<std::string(std::size_t index)>;

/// A sentence and where in the text it goes, 0 first, 1 last.
struct Placed {
  double where = 0;
  std::string text;
};

/// Gives sentences places by chance; in the order given, or in any.
std::vector<Placed> place_all(
    const std::vector<std::string>& sentences,
    bool keep_order,
    WordMaker& maker) {
  std::vector<double> places(sentences.size());
  for (double& place : places) {
    place = maker.fraction();
  }
  if (keep_order) std::sort(places.begin(), places.end());
  std::vector<Placed> placed;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    placed.push_back({places[i], sentences[i]});
  }
  std::stable_sort(
      placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
        return a.where < b.where;
      });
  return placed;
}

/// Units in order, with the placed sentences between them.
std::string assemble(
    std::string text,
    const Unit& unit,
    std::size_t units,
    std::span<const Placed> placed) {
  auto next = placed.begin();
  const auto slots = static_cast<double>(units + 1);
  for (std::size_t i = 0; i <= units; ++i) {
    for (; next != placed.end() &&
           next->where * slots < static_cast<double>(i + 1);
         ++next) {
      if (text.back() != ' ' && text.back() != '\n') text += ' ';
      text += next->text + ' ';
    }
    if (i < units) text += unit(i);
  }
  return text;
}

Unit noise() {
  return [](std::size_t) { return std::string(kNoiseText); };
}

/// "a, b and c".
std::string listed(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " and " : ", ";
    text += words[i];
  }
  return text;
}

// Needles in a haystack

enum class Hay { kNoise, kText, kNeedles };

struct NeedleKind {
  std::string_view task;
  Hay hay;
  bool uuid_keys;
  bool uuid_values;
  std::size_t keys;
  std::size_t values;  // of each key
  std::size_t asked;   // keys
};

constexpr std::array<NeedleKind, 8> kNeedleKinds{
    {{"niah_single_1", Hay::kNoise, false, false, 1, 1, 1},
     {"niah_single_2", Hay::kText, false, false, 1, 1, 1},
     {"niah_single_3", Hay::kText, false, true, 1, 1, 1},
     {"niah_multikey_1", Hay::kText, false, false, 4, 1, 1},
     {"niah_multikey_2", Hay::kNeedles, false, false, 1, 1, 1},
     {"niah_multikey_3", Hay::kNeedles, true, true, 1, 1, 1},
     {"niah_multivalue", Hay::kText, false, false, 1, 4, 1},
     {"niah_multiquery", Hay::kText, false, false, 4, 1, 4}}};

std::string make_key(const NeedleKind& kind, WordMaker& maker) {
  return kind.uuid_keys ? maker.uuid() : maker.name();
}

std::string make_value(const NeedleKind& kind, WordMaker& maker) {
  constexpr std::size_t kDigits = 7;
  return kind.uuid_values ? maker.uuid() : maker.number(kDigits);
}

std::string_view noun_of(const NeedleKind& kind) {
  return kind.uuid_values ? "identifier" : "number";
}

std::string needle(
    const NeedleKind& kind, const std::string& key, const std::string& value) {
  return "The secret " + std::string(noun_of(kind)) + " of " + key + " is " +
         value + ".";
}

/// Needles that nobody asks about, each made when it is first wanted.
Unit needle_units(const NeedleKind& kind, WordMaker maker) {
  const auto made = std::make_shared<std::vector<std::string>>();
  const auto source = std::make_shared<WordMaker>(std::move(maker));
  return [=](std::size_t index) {
    while (made->size() <= index) {
      const std::string key = make_key(kind, *source);
      made->push_back(needle(kind, key, make_value(kind, *source)) + " ");
    }
    return (*made)[index];
  };
}

void ask_for_values(
    RulerSample& sample,
    const NeedleKind& kind,
    std::span<const std::string> keys) {
  const bool one = sample.references.size() == 1;
  const std::string what = "secret " + std::string(noun_of(kind)) +
                           (one ? "" : "s") + " of " + listed(keys);
  sample.question = "\n\nQuestion: " +
                    std::string(one ? "What is the " : "What are all the ") +
                    what + " in the text?\n";
  sample.answer_prefix = "Answer: The " + what + (one ? " is" : " are");
}

RulerDraft draft_needles(
    const NeedleKind& kind, const Haystack& haystack, WordMaker maker) {
  RulerDraft draft;
  std::vector<std::string> keys;
  std::vector<std::string> needles;
  for (std::size_t k = 0; k < kind.keys; ++k) {
    keys.push_back(make_key(kind, maker));
    for (std::size_t v = 0; v < kind.values; ++v) {
      const std::string value = make_value(kind, maker);
      needles.push_back(needle(kind, keys.back(), value));
      if (k < kind.asked) draft.sample.references.push_back(value);
    }
  }
  ask_for_values(draft.sample, kind, std::span(keys).first(kind.asked));
  const std::vector<Placed> placed = place_all(needles, false, maker);
  draft.most = kEndless;
  Unit unit = noise();
  if (kind.hay == Hay::kText) {
    const std::size_t count = haystack.sentences.size();
    const std::size_t start = count == 0 ? 0 : maker.below(count);
    unit = [&haystack, start](std::size_t index) {
      const auto& sentences = haystack.sentences;
      return sentences[(start + index) % sentences.size()];
    };
    draft.least = 1;
    draft.most = count;
  } else if (kind.hay == Hay::kNeedles) {
    unit = needle_units(kind, std::move(maker));
    draft.least = 1;
  }
  const std::string head =
      "The text below says which secret " + std::string(noun_of(kind)) +
      " belongs to which name. Keep this in mind for a question "
      "afterwards.\n\n";
  draft.context = [=](std::size_t units) {
    return assemble(head, unit, units, placed);
  };
  return draft;
}

// Variable tracking

struct Chain {
  std::string value;
  std::vector<std::string> variables;
  std::vector<std::string> statements;
};

Chain make_chain(WordMaker& maker) {
  constexpr std::size_t kVariables = 5;  // four hops
  Chain chain;
  chain.value = maker.number(5);
  for (std::size_t i = 0; i < kVariables; ++i) {
    const std::string from =
        i == 0 ? chain.value : "VAR " + chain.variables.back();
    chain.variables.push_back(maker.variable(5));
    chain.statements.push_back(
        "VAR " + chain.variables.back() + " = " + from + ".");
  }
  return chain;
}

void ask_for_variables(RulerSample& sample, const Chain& chain) {
  sample.question = "\n\nQuestion: Which variables have the value " +
                    chain.value + ", given or passed on?\n";
  sample.answer_prefix =
      "Answer: The variables with the value " + chain.value + " are";
  sample.references = chain.variables;
}

/// A solved problem of the same kind, as RULER puts one in front.
std::string example_of(const std::string& context, const RulerSample& sample) {
  return context + sample.question + sample.answer_prefix +
         reference_answer(sample) + ".\n\n";
}

RulerDraft draft_variables(WordMaker maker) {
  const std::string task =
      "Keep track of the variables (VAR) in the text below for a question "
      "afterwards.\n\n";
  RulerSample solved;
  const Chain first = make_chain(maker);
  ask_for_variables(solved, first);
  std::string text = task;
  for (const std::string& statement : first.statements) {
    text += std::string(kNoiseText.substr(0, kNoiseText.find('.') + 2)) +
            statement + (statement == first.statements.back() ? "" : " ");
  }

  RulerDraft draft;
  const Chain chain = make_chain(maker);
  ask_for_variables(draft.sample, chain);
  const std::vector<Placed> placed = place_all(chain.statements, true, maker);
  draft.most = kEndless;
  draft.context = [=,
                   head = example_of(text, solved) + task](std::size_t units) {
    return assemble(head, noise(), units, placed);
  };
  return draft;
}

// Common words

/// The words of the text in any order, then made-up ones.
class WordList {
 public:
  WordList(const Haystack& haystack, WordMaker maker)
      : words_(haystack.words), maker_(std::move(maker)) {
    maker_.shuffle(words_);
    for (const std::string& word : words_) {
      maker_.take(word);
    }
  }

  std::string operator[](std::size_t index) {
    while (words_.size() <= index) {
      words_.push_back(maker_.word(3));
    }
    return words_[index];
  }

 private:
  std::vector<std::string> words_;
  WordMaker maker_;
};

/// Words `common` so often and words `rare` so often each, mixed, numbered.
struct Counted {
  std::vector<std::string> common;
  std::size_t common_times = 0;
  std::vector<std::string> rare;
  std::size_t rare_times = 0;
};

std::string numbered_list(const Counted& words, WordMaker maker) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < words.common_times; ++i) {
    all.insert(all.end(), words.common.begin(), words.common.end());
  }
  for (std::size_t i = 0; i < words.rare_times; ++i) {
    all.insert(all.end(), words.rare.begin(), words.rare.end());
  }
  maker.shuffle(all);
  std::string text;
  for (std::size_t i = 0; i < all.size(); ++i) {
    text += std::to_string(i + 1) + ". " + all[i] + " ";
  }
  text.pop_back();
  return text;
}

constexpr std::size_t kCommonWords = 10;

std::vector<std::string> words_from(
    WordList& list, std::size_t first, std::size_t count) {
  std::vector<std::string> words;
  for (std::size_t i = first; i < first + count; ++i) {
    words.push_back(list[i]);
  }
  return words;
}

void ask_for_common_words(RulerSample& sample) {
  sample.question =
      "\n\nQuestion: Which ten words occur most often in the list?\n";
  sample.answer_prefix = "Answer: The ten words that occur most often are";
}

RulerDraft draft_common_words(
    const Haystack& haystack, std::size_t length, const WordMaker& maker) {
  // As RULER: few repetitions where many would not fit.
  constexpr std::size_t kLong = 4096;
  const std::size_t common_times = length < kLong ? 6 : 30;
  const std::size_t rare_times = length < kLong ? 1 : 3;
  const std::string task =
      "Below is a numbered list of words. Keep in mind which occur most often "
      "for a question afterwards.\n\n";
  const auto list = std::make_shared<WordList>(haystack, maker);
  Counted solved{words_from(*list, 0, kCommonWords), 3, {}, 1};
  solved.rare = words_from(*list, kCommonWords, kCommonWords);
  RulerSample example;
  ask_for_common_words(example);
  example.references = solved.common;
  const std::string head =
      example_of(task + numbered_list(solved, maker), example) + task;

  RulerDraft draft;
  ask_for_common_words(draft.sample);
  constexpr std::size_t kFirst = 2 * kCommonWords;
  draft.sample.references = words_from(*list, kFirst, kCommonWords);
  draft.least = 1;
  draft.most = kEndless;
  draft.context = [=, common = draft.sample.references](std::size_t units) {
    Counted words{common, common_times, {}, rare_times};
    words.rare = words_from(*list, kFirst + kCommonWords, units);
    return head + numbered_list(words, maker);
  };
  return draft;
}

// Frequent words

/// Words of rank 1, 2, ... in proportion to 1 / rank^2, mixed. Rank 1 is
/// filler.
std::string coded_text(
    const std::vector<std::string>& words, std::size_t units, WordMaker maker) {
  constexpr double kSum = 1.6449340668482264;  // of 1 / rank^2
  std::vector<std::string> all;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto rank = static_cast<double>(i + 1);
    const double share = static_cast<double>(units) / (kSum * rank * rank);
    const auto times = static_cast<std::size_t>(std::llround(share));
    if (times == 0) break;
    all.insert(all.end(), times, words[i]);
  }
  maker.shuffle(all);
  std::string text;
  for (const std::string& word : all) {
    text += word + " ";
  }
  return text;
}

RulerDraft draft_frequent_words(WordMaker maker) {
  constexpr std::size_t kRanks = 512;
  constexpr std::size_t kLeast = 150;  // the first five ranks differ from here
  std::vector<std::string> words{"...."};
  while (words.size() < kRanks) {
    words.push_back(maker.word(3));
  }
  RulerDraft draft;
  draft.sample.question =
      "\n\nQuestion: Which three words occur most often in the coded text, "
      "filler aside?\n";
  draft.sample.answer_prefix =
      "Answer: The three words that occur most often are";
  draft.sample.references = {words[1], words[2], words[3]};
  draft.least = kLeast;
  draft.most = kEndless;
  draft.context = [=](std::size_t units) {
    return "Below is a coded text, in which \"....\" is filler. Keep in mind "
           "which words occur most often for a question afterwards.\n\n" +
           coded_text(words, units, maker);
  };
  return draft;
}

}  // namespace

RulerDraft draft_ruler(
    std::string_view task,
    const Haystack& haystack,
    std::size_t length,
    WordMaker maker) {
  if (task == "vt") return draft_variables(std::move(maker));
  if (task == "cwe") {
    return draft_common_words(haystack, length, maker);
  }
  if (task == "fwe") return draft_frequent_words(std::move(maker));
  const auto* const kind = std::find_if(
      kNeedleKinds.begin(), kNeedleKinds.end(), [&](const NeedleKind& each) {
        return each.task == task;
      });
  return draft_needles(*kind, haystack, std::move(maker));
}

}  // namespace qfilters::eval
