#pragma once

#include <cstddef>
#include <memory>

#include "eval/tasks/reading.h"
#include "task_command.h"

namespace qfilters::cli {

/// How "query" of a run's JSON says that the context was compressed before
/// the question was known.
inline constexpr const char* kQueryAgnostic = "agnostic";

/// Those who are asked, by the protocol of the run: one that streams, or all
/// contenders after one reading. `inputs` must outlive them.
[[nodiscard]] std::unique_ptr<eval::Readers> make_readers(
    const TaskInputs& inputs);

/// What every run that asks something has; `tokens` of its longest sequence.
[[nodiscard]] Json make_run(
    const TaskInputs& inputs,
    const eval::Readers& readers,
    std::size_t reader,
    std::size_t tokens);

/// The tasks of `qfilters eval` that have a file of their own.
extern const Task kRuler;
extern const Task kQuestions;
extern const Task kFidelity;

}  // namespace qfilters::cli
