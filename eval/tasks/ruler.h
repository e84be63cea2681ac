#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "eval/run.h"
#include "eval/tasks/haystack.h"
#include "eval/tasks/reading.h"
#include "eval/tasks/ruler_samples.h"
#include "eval/text.h"

namespace qfilters::eval {

struct RulerOptions {
  std::vector<std::string> tasks;  ///< names; none: all
  /// Tokens of sample and answer together, at most.
  std::vector<std::size_t> lengths{2048};
  std::size_t samples = 1;  ///< of each task at each length
  std::uint64_t seed = 0;
};

/// One sample and what became of it.
struct RulerCell {
  std::string task;
  std::size_t length = 0;
  std::size_t sample = 0;
  double score = 0;  ///< share of the references found
  double nll_per_token = 0;
  std::string prediction;
  std::vector<std::string> references;
  std::size_t tokens = 0;  ///< of the sample, the answer not among them
  double kept = 1;         ///< see Reply
};

struct RulerResult {
  std::vector<RulerCell> cells;  ///< by length, task, sample
};

/// The mean of cells that belong together.
struct RulerMean {
  std::string task;
  std::size_t length = 0;  ///< 0 for the mean over lengths
  double score = 0;
  double nll_per_token = 0;
  std::size_t samples = 0;
};

/// One mean for each length and task in the order of their first cells; with
/// `over_lengths`, one for each task.
[[nodiscard]] std::vector<RulerMean> ruler_means(
    std::span<const RulerCell> cells, bool over_lengths = false);

/// Throws Error kInvalidArgument for an unknown or repeated task, an empty
/// list, a repeated length, no samples or a length beyond kMostTokens.
void check_ruler_options(const RulerOptions& options);

/// The tasks that are asked for.
[[nodiscard]] std::vector<RulerTask> ruler_tasks_of(
    const RulerOptions& options);

/// The sample that belongs to a cell, made again.
[[nodiscard]] RulerSample ruler_sample_of(
    const Codec& codec,
    const Haystack& haystack,
    const RulerOptions& options,
    const RulerCell& cell);

/// Throws Error kInvalidArgument when a task has no room in the shortest
/// length.
void check_ruler_rooms(
    const Codec& codec, const Haystack& haystack, const RulerOptions& options);

/// Which of RULER's tasks still work from a bounded cache? Query-agnostic, as
/// Reading does it; each sample is a context of its own in a sequence of
/// `length` tokens. The loss is that of the references in order. One result a
/// reader.
[[nodiscard]] std::vector<RulerResult> run_ruler(
    Readers& readers,
    const Codec& codec,
    const Haystack& haystack,
    const RulerOptions& options,
    const Progress& progress = {});

}  // namespace qfilters::eval
