#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/tasks/haystack.h"
#include "eval/text.h"

namespace qfilters::eval {

/// A kind of task of RULER (arXiv:2404.06654).
struct RulerTask {
  std::string_view name;
  std::size_t generate;  ///< most tokens of an answer, as RULER has it
};

/// The eleven kinds that need no data set, in RULER's order.
[[nodiscard]] std::span<const RulerTask> ruler_tasks() noexcept;

/// Throws Error kInvalidArgument, listing what is known.
[[nodiscard]] const RulerTask& find_ruler_task(std::string_view name);

/// One problem. The sentences are our own and names and values come from the
/// seed: scores compare with each other, not with those of other generators.
struct RulerSample {
  std::string context;
  std::string question;
  std::string answer_prefix;  ///< what the answer goes on with
  std::vector<std::string> references;
  std::size_t tokens = 0;  ///< what the model wants in front, and all of these
};

/// Which sample of a series.
struct RulerPlace {
  std::size_t length = 0;  ///< tokens of sample and answer together, at most
  std::size_t index = 0;
  std::uint64_t seed = 0;
};

/// The text of the references as it is expected after the answer prefix.
[[nodiscard]] std::string reference_answer(const RulerSample& sample);

/// Makes a sample that fills its length: sample.tokens and the larger of
/// task.generate and the reference answer are at most `length`, and one piece
/// of text more would be too much or is not there. Depends on nothing but its
/// arguments. Throws Error kInvalidArgument when the task has no room. About
/// 2 log2(pieces) tokenizations of up to twice the length.
[[nodiscard]] RulerSample make_ruler_sample(
    const Codec& codec,
    const Haystack& haystack,
    const RulerTask& task,
    const RulerPlace& place);

/// Throws as make_ruler_sample() does, without making the sample.
void check_ruler_room(
    const Codec& codec,
    const Haystack& haystack,
    const RulerTask& task,
    const RulerPlace& place);

}  // namespace qfilters::eval
