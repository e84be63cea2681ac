#include "eval/tasks/ruler_samples.h"

#include <algorithm>
#include <array>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"

#include "eval/tasks/ruler_drafts.h"
#include "eval/tasks/word_maker.h"

namespace qfilters::eval {

namespace {

constexpr std::array<RulerTask, 11> kTasks{
    {{"niah_single_1", 128},
     {"niah_single_2", 128},
     {"niah_single_3", 128},
     {"niah_multikey_1", 128},
     {"niah_multikey_2", 128},
     {"niah_multikey_3", 128},
     {"niah_multivalue", 128},
     {"niah_multiquery", 128},
     {"vt", 30},
     {"cwe", 120},
     {"fwe", 50}}};

/// A maker whose words depend on the sample and on nothing else.
WordMaker maker_for(const RulerTask& task, const RulerPlace& place) {
  Fingerprint fingerprint;
  fingerprint.add(task.name);
  fingerprint.add(std::uint64_t{place.length});
  fingerprint.add(std::uint64_t{place.index});
  fingerprint.add(place.seed);
  return WordMaker(fingerprint.value());
}

std::string context_of(const RulerDraft& draft, std::size_t units) {
  std::string text = draft.context(units);
  // The question brings line breaks of its own.
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  return text;
}

/// A draft and the tokens that everything but its context takes.
struct Plan {
  RulerDraft draft;
  std::size_t question = 0;  ///< and what the model wants in front
  std::size_t reserved = 0;  ///< for the answer
};

Plan make_plan(
    const Codec& codec,
    const Haystack& haystack,
    const RulerTask& task,
    const RulerPlace& place) {
  Plan plan;
  plan.draft =
      draft_ruler(task.name, haystack, place.length, maker_for(task, place));
  const RulerSample& sample = plan.draft.sample;
  plan.question = codec.prefix.size() +
                  codec.tokenize(sample.question + sample.answer_prefix).size();
  plan.reserved =
      std::max(task.generate, codec.tokenize(reference_answer(sample)).size());
  return plan;
}

/// Tokens of the sample with so many units, the answer included.
std::size_t total(const Codec& codec, const Plan& plan, std::size_t units) {
  return plan.question + plan.reserved +
         codec.tokenize(context_of(plan.draft, units)).size();
}

void check_room(
    const Codec& codec,
    const Plan& plan,
    const RulerTask& task,
    const RulerPlace& place) {
  if (plan.draft.least > plan.draft.most) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "ruler: the text has no sentence for " + std::string(task.name));
  }
  const std::size_t needed = total(codec, plan, plan.draft.least);
  if (needed <= place.length) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "ruler: length " + std::to_string(place.length) +
          " has no room for task " + std::string(task.name) + ", which takes " +
          std::to_string(needed) + " tokens at least");
}

/// The most units that fit; the least ones do.
std::size_t most_units(
    const Codec& codec, const Plan& plan, std::size_t length) {
  const auto fits = [&](std::size_t units) {
    return total(codec, plan, units) <= length;
  };
  std::size_t low = plan.draft.least;
  std::size_t step = 16;
  while (low + step <= plan.draft.most && fits(low + step)) {
    low += step;
    step *= 2;
  }
  std::size_t high = std::min(low + step, plan.draft.most + 1);
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace

std::span<const RulerTask> ruler_tasks() noexcept {
  return kTasks;
}

const RulerTask& find_ruler_task(std::string_view name) {
  std::string known;
  for (const RulerTask& task : kTasks) {
    if (task.name == name) return task;
    known += (known.empty() ? "" : ", ") + std::string(task.name);
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      "ruler: unknown task '" + std::string(name) + "'; known: " + known);
}

std::string reference_answer(const RulerSample& sample) {
  std::string answer;
  for (const std::string& reference : sample.references) {
    answer += (answer.empty() ? " " : ", ") + reference;
  }
  return answer;
}

RulerSample make_ruler_sample(
    const Codec& codec,
    const Haystack& haystack,
    const RulerTask& task,
    const RulerPlace& place) {
  Plan plan = make_plan(codec, haystack, task, place);
  check_room(codec, plan, task, place);
  const std::size_t units = most_units(codec, plan, place.length);
  RulerSample sample = plan.draft.sample;
  sample.context = context_of(plan.draft, units);
  sample.tokens = total(codec, plan, units) - plan.reserved;
  return sample;
}

void check_ruler_room(
    const Codec& codec,
    const Haystack& haystack,
    const RulerTask& task,
    const RulerPlace& place) {
  check_room(codec, make_plan(codec, haystack, task, place), task, place);
}

}  // namespace qfilters::eval
