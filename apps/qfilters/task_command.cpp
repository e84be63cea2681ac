#include "task_command.h"

#include <functional>
#include <utility>

#include <fmt/core.h>

#include "qfilters/error.h"

#include "run_table.h"

namespace qfilters::cli {

namespace {

/// Loads what runs need and refuses what cannot work before the first run.
TaskInputs prepare(
    const Task& task,
    const TaskArguments& arguments,
    const std::vector<eval::RunSpec>& specs) {
  TaskInputs inputs;
  inputs.model = llama::Model::load(
      arguments.run.model,
      model_options(arguments.run.common, arguments.run.gpu_layers));
  inputs.codec = eval::make_codec(inputs.model);
  const std::size_t longest = task.longest(arguments, inputs.codec);
  for (const eval::RunSpec& spec : specs) {
    (void)eval::limits_of(spec, longest, inputs.model->layer_shapes());
    inputs.contenders.push_back(
        {spec,
         eval::load_run_filters(
             spec.policy, arguments.run.filters, *inputs.model)});
  }
  if (task.reads_text) {
    inputs.text = eval::read_tokens(
        arguments.text,
        inputs.codec,
        arguments.skip,
        task.text_tokens(arguments, inputs.codec));
  }
  if (task.check_runs != nullptr) task.check_runs(arguments, inputs);
  const std::size_t trained = inputs.model->trained_length();
  if (!arguments.child && trained != 0 && longest > trained) {
    warn(fmt::format(
        "{} tokens pass the model's trained length of {}", longest, trained));
  }
  return inputs;
}

std::vector<Json> run_here(
    const Task& task,
    const TaskArguments& arguments,
    const std::vector<eval::RunSpec>& specs) {
  const TaskInputs inputs = prepare(task, arguments, specs);
  if (arguments.child && !task.in_turns) {
    return task.run(arguments, inputs, report_step);
  }
  const eval::RunSpec& spec = specs.front();
  if (task.in_turns && arguments.child) {
    TurnTaker turns;
    return task.run(
        arguments, inputs, [&](std::size_t done, std::size_t total) {
          turns.next(done, total);
        });
  }
  ProgressBar bar(
      specs.size() > 1                ? "all at once"
      : eval::is_bounded(spec.policy) ? spec.policy + " " + spec.budget.text
                                      : spec.policy);
  return task.run(arguments, inputs, [&](std::size_t done, std::size_t total) {
    bar.update(done, total);
  });
}

/// Every setting of llama.cpp's cache, unless the user has chosen one.
std::vector<Candidate> llama_candidates(const CLI::App& command) {
  constexpr const char* kFlash = "--llama-flash-attn";
  constexpr const char* kType = "--llama-cache-type";
  if (command.count(kFlash) + command.count(kType) > 0) {
    return {{{"--policy", "llama"}}};
  }
  std::vector<Candidate> candidates;
  for (const auto& [flash, type] :
       {std::pair("off", "f16"), {"on", "f16"}, {"on", "q8_0"}}) {
    candidates.push_back(
        {{"--policy", "llama"}, {kFlash, flash}, {kType, type}});
  }
  return candidates;
}

}  // namespace

bool serves_all(const Task& task, const TaskArguments& arguments) {
  return task.together || arguments.run.protocol == "one-shot";
}

Candidate candidate_of(const eval::RunSpec& spec) {
  Candidate candidate{{"--policy", spec.policy}};
  if (eval::is_bounded(spec.policy)) {
    candidate.emplace_back("--budget", spec.budget.text);
  }
  return candidate;
}

namespace {

std::vector<Json> run_all(
    const Task& task, const TaskArguments& arguments, const CLI::App& command) {
  const std::vector<eval::RunSpec> specs = make_specs(arguments.run);
  std::vector<Candidate> candidates;
  for (const eval::RunSpec& spec : specs) {
    if (task.in_turns && spec.policy == "llama" && !arguments.child) {
      for (Candidate& each : llama_candidates(command)) {
        candidates.push_back(std::move(each));
      }
    } else {
      candidates.push_back(candidate_of(spec));
    }
  }
  if (candidates.size() == 1 || serves_all(task, arguments)) {
    return run_here(task, arguments, specs);
  }
  // Errors before the first run; what is loaded here is gone before it.
  (void)prepare(task, arguments, specs);
  return run_children(
      command, candidates, task.in_turns ? Order::kInTurns : Order::kOneByOne);
}

}  // namespace

void warn_of_idle(const Json& run) {
  const auto evictions = run.find("evictions");
  if (run["budget"].is_null() || evictions == run.end() || *evictions != 0)
    return;
  warn(fmt::format(
      "{} {}: nothing was evicted, no head held more than budget and interval",
      run["policy"].get<std::string>(),
      run["budget"].get<std::size_t>()));
}

namespace {

void check_arguments(const Task& task, TaskArguments& arguments) {
  std::vector<std::string> files = arguments.run.filters;
  files.insert(
      files.end(),
      {arguments.run.model, arguments.text, arguments.question_file});
  check_outputs({arguments.run.common.json}, files);
  if (arguments.run.protocol == "one-shot" && !task.one_shot) {
    throw Error(
        ErrorKind::kInvalidArgument,
        task.name + ": there is no protocol one-shot here");
  }
  task.check(arguments);
  if (task.load != nullptr) task.load(arguments);
}

void run_task(
    const Task& task, TaskArguments& arguments, const CLI::App& command) {
  check_arguments(task, arguments);
  const std::vector<Json> runs = run_all(task, arguments, command);
  Json json;
  json["task"] = task.name;
  json["runs"] = runs;
  write_json(arguments.run.common.json, json);
  if (arguments.child) return;
  for (const Json& run : runs)
    warn_of_idle(run);
  fmt::print("{}", make_table(task.name, runs));
}

}  // namespace

CLI::Option* add_text_options(CLI::App& command, TaskArguments& arguments) {
  CLI::Option* const text =
      command.add_option("--text", arguments.text, "Text to read")
          ->type_name("FILE");
  add_count(
      command,
      "--skip",
      arguments.skip,
      "Tokens of the text to leave out first");
  return text;
}

void add_shared_options(CLI::App& command, TaskArguments& arguments) {
  command
      .add_option(
          "--protocol",
          arguments.run.protocol,
          "streaming: rows are evicted while the text comes in; one-shot: the "
          "context is read with the full cache, compressed once without the "
          "question, then nothing goes any more")
      ->capture_default_str();
  add_run_options(command, arguments.run, Candidates::kList);
}

void add_task_options(
    CLI::App& command, const Task& task, TaskArguments& arguments) {
  if (task.reads_text) add_text_options(command, arguments)->required();
  task.add_options(command, arguments);
  add_shared_options(command, arguments);
  command.add_flag(kChildFlag, arguments.child)->group("");
}

std::shared_ptr<const llama::Model> check_task(
    const Task& task, TaskArguments& arguments) {
  check_arguments(task, arguments);
  return prepare(task, arguments, make_specs(arguments.run)).model;
}

void add_task(CLI::App& parent, const Task& task, Action& action) {
  CLI::App* const command = parent.add_subcommand(task.name, task.help);
  const auto arguments = std::make_shared<TaskArguments>();
  add_task_options(*command, task, *arguments);
  command->callback([&action, &task, command, arguments] {
    action = [&task, command, arguments] {
      run_task(task, *arguments, *command);
    };
  });
}

}  // namespace qfilters::cli
