#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "child_runs.h"
#include "commands.h"
#include "eval/run.h"
#include "eval/tasks/decode.h"
#include "eval/tasks/fidelity.h"
#include "eval/tasks/needle.h"
#include "eval/tasks/perplexity.h"
#include "eval/tasks/questions.h"
#include "eval/tasks/ruler.h"
#include "eval/text.h"
#include "output.h"
#include "run_options.h"

namespace qfilters::cli {

/// The options of a task; each task reads its own part.
struct TaskArguments {
  RunOptions run;
  std::string text;
  std::size_t skip = 0;
  eval::PerplexityOptions perplexity;
  eval::NeedleOptions needle;
  eval::DecodeOptions decode;
  eval::RulerOptions ruler;
  std::string kvpress;    // folder for results in kvpress' layout
  std::string ruler_out;  // and in RULER's
  eval::FidelityOptions fidelity;
  eval::QuestionsOptions questions;
  std::string question_file;
  eval::QuestionSet question_set;  // what it holds, once checked
  bool child = false;
};

/// Everything that runs need.
struct TaskInputs {
  std::vector<eval::Contender> contenders;
  std::shared_ptr<const llama::Model> model;
  eval::Codec codec;
  std::vector<eval::Token> text;  // without the prefix
};

/// What candidates are run through, as a command sees it.
struct Task {
  std::string name;
  std::string help;
  /// One after the other; or all at once, each step of each in turn, so that
  /// what else the machine does falls on all alike. Policy llama then runs
  /// with each of its settings.
  bool in_turns;
  void (*add_options)(CLI::App& command, TaskArguments& arguments);
  /// Throws Error for what can be refused without a model.
  void (*check)(const TaskArguments& arguments);
  /// Tokens of the text that are needed.
  std::size_t (*text_tokens)(const TaskArguments&, const eval::Codec&);
  /// Tokens of the longest sequence.
  std::size_t (*longest)(const TaskArguments&, const eval::Codec&);
  /// Runs every contender; their results in order. There is one contender,
  /// unless all share a process: see `together` and `one_shot`.
  std::vector<Json> (*run)(
      const TaskArguments&, const TaskInputs&, const eval::Progress&);
  /// Whether it has --text and --skip.
  bool reads_text = true;
  /// Reads files of the task's own into the arguments; after check().
  void (*load)(TaskArguments& arguments) = nullptr;
  /// Throws Error for what can be refused before the first run, with the model
  /// and the text.
  void (*check_runs)(const TaskArguments& arguments, const TaskInputs& inputs) =
      nullptr;
  /// What is read serves all contenders, which then run in one process; with
  /// protocol one-shot that is always so.
  bool together = false;
  /// Whether there is a protocol one-shot.
  bool one_shot = false;
};

/// Whether one process serves all candidates, from one reading, instead of a
/// process each.
[[nodiscard]] bool serves_all(const Task& task, const TaskArguments& arguments);

/// Adds --text and --skip; returns the first.
CLI::Option* add_text_options(CLI::App& command, TaskArguments& arguments);

/// Adds what all tasks have: model, policies, budgets and the like.
void add_shared_options(CLI::App& command, TaskArguments& arguments);

/// Adds all options of a task's own command.
void add_task_options(
    CLI::App& command, const Task& task, TaskArguments& arguments);

/// Throws Error for all that would be refused before the first run; reads the
/// task's own files into the arguments. Returns the model.
std::shared_ptr<const llama::Model> check_task(
    const Task& task, TaskArguments& arguments);

/// What tells a run from the others; policies that keep all have no budget.
[[nodiscard]] Candidate candidate_of(const eval::RunSpec& spec);

/// Warns of a run whose budget nothing had to leave for: it says nothing about
/// its policy.
void warn_of_idle(const Json& run);

/// Adds the subcommand that runs a task with each policy and budget, each in a
/// process of its own unless one reading serves them all, and prints a table.
/// `task` must outlive `app`.
void add_task(CLI::App& parent, const Task& task, Action& action);

}  // namespace qfilters::cli
