#include "eval/tasks/ruler.h"

#include <algorithm>
#include <set>
#include <utility>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "ruler: " + message);
}

/// What one reader makes of the sample of `cell`.
RulerCell answered(RulerCell cell, const RulerSample& sample, Reply reply) {
  cell.score = share_found(reply.prediction, sample.references);
  cell.nll_per_token = reply.nll_per_token;
  cell.prediction = std::move(reply.prediction);
  cell.references = sample.references;
  cell.tokens = sample.tokens;
  cell.kept = reply.kept;
  return cell;
}

Inquiry inquiry_of(
    const Codec& codec, const RulerSample& sample, std::size_t generate) {
  Inquiry inquiry = make_inquiry(
      codec, sample.question + sample.answer_prefix, reference_answer(sample));
  inquiry.references = sample.references;
  inquiry.generate = generate;
  return inquiry;
}

std::vector<Token> context_of(const Codec& codec, const RulerSample& sample) {
  std::vector<Token> context = codec.prefix;
  const std::vector<Token> text = codec.tokenize(sample.context);
  context.insert(context.end(), text.begin(), text.end());
  return context;
}

}  // namespace

std::vector<RulerMean> ruler_means(
    std::span<const RulerCell> cells, bool over_lengths) {
  std::vector<RulerMean> means;
  for (const RulerCell& cell : cells) {
    const std::size_t length = over_lengths ? 0 : cell.length;
    auto mean =
        std::find_if(means.begin(), means.end(), [&](const RulerMean& each) {
          return each.task == cell.task && each.length == length;
        });
    if (mean == means.end()) {
      mean = means.insert(mean, RulerMean{cell.task, length});
    }
    mean->score += cell.score;
    mean->nll_per_token += cell.nll_per_token;
    ++mean->samples;
  }
  for (RulerMean& mean : means) {
    mean.score /= static_cast<double>(mean.samples);
    mean.nll_per_token /= static_cast<double>(mean.samples);
  }
  return means;
}

void check_ruler_options(const RulerOptions& options) {
  std::set<std::string> tasks;
  for (const std::string& task : options.tasks) {
    static_cast<void>(find_ruler_task(task));
    if (!tasks.insert(task).second) refuse("task " + task + " stands twice");
  }
  if (options.lengths.empty()) refuse("lengths must not be empty");
  std::set<std::size_t> lengths;
  for (const std::size_t length : options.lengths) {
    if (length == 0 || length > kMostTokens / 2) {
      refuse(
          "length " + std::to_string(length) + " is not in 1.." +
          std::to_string(kMostTokens / 2));
    }
    if (!lengths.insert(length).second) {
      refuse("length " + std::to_string(length) + " stands twice");
    }
  }
  if (!is_size(options.samples)) {
    refuse(
        "samples: " + std::to_string(options.samples) + " is not in 1.." +
        std::to_string(kMostSize));
  }
}

std::vector<RulerTask> ruler_tasks_of(const RulerOptions& options) {
  std::vector<RulerTask> tasks;
  for (const std::string& name : options.tasks) {
    tasks.push_back(find_ruler_task(name));
  }
  if (tasks.empty()) {
    tasks.assign(ruler_tasks().begin(), ruler_tasks().end());
  }
  return tasks;
}

RulerSample ruler_sample_of(
    const Codec& codec,
    const Haystack& haystack,
    const RulerOptions& options,
    const RulerCell& cell) {
  return make_ruler_sample(
      codec,
      haystack,
      find_ruler_task(cell.task),
      {cell.length, cell.sample, options.seed});
}

void check_ruler_rooms(
    const Codec& codec, const Haystack& haystack, const RulerOptions& options) {
  const std::size_t shortest =
      *std::min_element(options.lengths.begin(), options.lengths.end());
  for (const RulerTask& task : ruler_tasks_of(options)) {
    for (std::size_t i = 0; i < options.samples; ++i) {
      check_ruler_room(codec, haystack, task, {shortest, i, options.seed});
    }
  }
}

std::vector<RulerResult> run_ruler(
    Readers& readers,
    const Codec& codec,
    const Haystack& haystack,
    const RulerOptions& options,
    const Progress& progress) {
  check_ruler_options(options);
  check_ruler_rooms(codec, haystack, options);
  const std::vector<RulerTask> tasks = ruler_tasks_of(options);
  const std::size_t total =
      options.lengths.size() * tasks.size() * options.samples * readers.count();
  std::vector<RulerResult> results(readers.count());
  std::size_t done = 0;
  for (const std::size_t length : options.lengths) {
    for (const RulerTask& task : tasks) {
      for (std::size_t i = 0; i < options.samples; ++i) {
        RulerCell cell;
        cell.task = task.name;
        cell.length = length;
        cell.sample = i;
        const RulerSample sample =
            ruler_sample_of(codec, haystack, options, cell);
        const Inquiry inquiry = inquiry_of(codec, sample, task.generate);
        const auto ask = [&](std::size_t reader, Reading& reading) {
          results[reader].cells.push_back(
              answered(cell, sample, reading.ask(inquiry)));
          ++done;
          if (progress) progress(done, total);
        };
        readers.read(context_of(codec, sample), length, ask);
      }
    }
  }
  return results;
}

}  // namespace qfilters::eval
