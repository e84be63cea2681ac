#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "qfilters/error.h"

#include "child_runs.h"
#include "commands.h"
#include "eval/run.h"
#include "eval/tasks/needle.h"
#include "eval/tasks/perplexity.h"
#include "eval/text.h"
#include "output.h"
#include "run_options.h"
#include "run_table.h"

namespace qfilters::cli {

namespace {

struct EvalArguments {
  RunOptions run;
  std::string text;
  std::size_t skip = 0;
  eval::PerplexityOptions perplexity;
  eval::NeedleOptions needle;
  bool child = false;
};

/// Everything that one run needs.
struct Inputs {
  eval::RunSpec spec;
  std::shared_ptr<const llama::Model> model;
  eval::Codec codec;
  std::vector<eval::Token> text;  // without the prefix
  std::shared_ptr<const FilterBank> filters;
};

/// A task as the command sees it.
struct Task {
  std::string name;
  std::string help;
  void (*add_options)(CLI::App& command, EvalArguments& arguments);
  /// Throws Error for what can be refused without a model.
  void (*check)(const EvalArguments& arguments);
  /// Tokens of the text that are needed.
  std::size_t (*text_tokens)(const EvalArguments&, const eval::Codec&);
  /// Tokens of the longest sequence.
  std::size_t (*longest)(const EvalArguments&, const eval::Codec&);
  Json (*run)(const EvalArguments&, const Inputs&, const eval::Progress&);
};

// perplexity

void add_perplexity_options(CLI::App& command, EvalArguments& arguments) {
  add_count(
      command,
      "--tokens",
      arguments.perplexity.tokens,
      "Tokens of the text to predict in chunks");
  add_count(
      command,
      "--from",
      arguments.perplexity.from,
      "Predictions count from this position on; at most half of the tokens");
  add_count(
      command,
      "--decode",
      arguments.perplexity.decode,
      "Tokens after them to go one by one, for the decode speed");
}

void check_perplexity(const EvalArguments& arguments) {
  if (arguments.perplexity.tokens < 2) {
    throw Error(
        ErrorKind::kInvalidArgument, "perplexity: --tokens must be 2 or more");
  }
}

std::size_t perplexity_longest(
    const EvalArguments& arguments, const eval::Codec& /*codec*/) {
  return arguments.perplexity.tokens + arguments.perplexity.decode;
}

std::size_t perplexity_text(
    const EvalArguments& arguments, const eval::Codec& codec) {
  const std::size_t longest = perplexity_longest(arguments, codec);
  return longest - std::min(longest, codec.prefix.size());
}

Json run_perplexity_task(
    const EvalArguments& arguments,
    const Inputs& inputs,
    const eval::Progress& progress) {
  std::vector<eval::Token> tokens = inputs.codec.prefix;
  tokens.insert(tokens.end(), inputs.text.begin(), inputs.text.end());
  const std::unique_ptr<llama::Session> session = eval::open_session(
      inputs.spec, inputs.model, inputs.filters, tokens.size());
  const eval::PerplexityResult result = eval::run_perplexity(
      *session,
      tokens,
      inputs.codec.vocabulary,
      arguments.perplexity,
      progress);
  eval::RunRecord record = eval::start_record(
      inputs.spec,
      eval::limits_of(inputs.spec, tokens.size(), inputs.model->layer_shapes()),
      *inputs.model);
  record.stats = session->stats();
  record.prefill_tokens = result.prefill_tokens;
  record.decode_tokens = result.decode_tokens;
  record.prefill_seconds = result.prefill_seconds;
  record.decode_seconds = result.decode_seconds;
  Json json = eval::to_json(record);
  json["perplexity"] = result.perplexity;
  json["mean_nll"] = result.mean_nll;
  json["predictions"] = result.predictions;
  return json;
}

// needle

void add_needle_options(CLI::App& command, EvalArguments& arguments) {
  const auto list = [&](const char* name, auto& values, const char* help) {
    return command.add_option(name, values, help)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->type_name("LIST")
        ->capture_default_str();
  };
  list("--lengths", arguments.needle.lengths, "Tokens of text, each")
      ->check(whole_number());
  list("--depths", arguments.needle.depths, "Percent of the text before");
  list("--keys", arguments.needle.keys, "Five digits to hide, each");
}

void check_needle(const EvalArguments& arguments) {
  eval::check_needle_options(arguments.needle);
}

std::size_t needle_text(
    const EvalArguments& arguments, const eval::Codec& /*codec*/) {
  const std::vector<std::size_t>& lengths = arguments.needle.lengths;
  return *std::max_element(lengths.begin(), lengths.end());
}

std::size_t needle_longest(
    const EvalArguments& arguments, const eval::Codec& codec) {
  return eval::needle_tokens(codec, arguments.needle);
}

Json run_needle_task(
    const EvalArguments& arguments,
    const Inputs& inputs,
    const eval::Progress& progress) {
  const eval::NeedleResult result = eval::run_needle(
      [&](std::size_t tokens) {
        return eval::open_session(
            inputs.spec, inputs.model, inputs.filters, tokens);
      },
      inputs.codec,
      inputs.text,
      arguments.needle,
      progress);
  eval::RunRecord record = eval::start_record(
      inputs.spec,
      eval::limits_of(
          inputs.spec,
          needle_longest(arguments, inputs.codec),
          inputs.model->layer_shapes()),
      *inputs.model);
  record.stats = result.stats;
  record.prefill_tokens = result.prefill_tokens;
  record.decode_tokens = result.decode_tokens;
  record.prefill_seconds = result.prefill_seconds;
  record.decode_seconds = result.decode_seconds;
  Json json = eval::to_json(record);
  json["cells"] = Json::array();
  for (const eval::NeedleCell& cell : result.cells) {
    json["cells"].push_back(
        {{"length", cell.length},
         {"depth", cell.depth},
         {"key", cell.key},
         {"hit", cell.hit},
         {"nll_per_token", cell.nll_per_token}});
  }
  json["accuracy"] = result.accuracy;
  json["mean_nll"] = result.mean_nll;
  return json;
}

const Task kPerplexity{
    "perplexity",
    "How well a text is predicted from a bounded cache",
    add_perplexity_options,
    check_perplexity,
    perplexity_text,
    perplexity_longest,
    run_perplexity_task};

const Task kNeedle{
    "needle",
    "Whether a fact is recalled from a bounded cache",
    add_needle_options,
    check_needle,
    needle_text,
    needle_longest,
    run_needle_task};

/// Loads what runs need and refuses what cannot work before the first run.
Inputs prepare(
    const Task& task,
    const EvalArguments& arguments,
    const std::vector<eval::RunSpec>& specs) {
  Inputs inputs;
  inputs.model = llama::Model::load(
      arguments.run.model,
      model_options(arguments.run.common, arguments.run.gpu_layers));
  inputs.codec = eval::make_codec(inputs.model);
  const std::size_t longest = task.longest(arguments, inputs.codec);
  for (const eval::RunSpec& spec : specs) {
    (void)eval::limits_of(spec, longest, inputs.model->layer_shapes());
    if (inputs.filters == nullptr) {
      inputs.filters = eval::load_run_filters(
          spec.policy, arguments.run.filters, *inputs.model);
    }
  }
  inputs.text = eval::read_tokens(
      arguments.text,
      inputs.codec,
      arguments.skip,
      task.text_tokens(arguments, inputs.codec));
  const std::size_t trained = inputs.model->trained_length();
  if (!arguments.child && trained != 0 && longest > trained) {
    warn(fmt::format(
        "{} tokens pass the model's trained length of {}", longest, trained));
  }
  inputs.spec = specs.front();
  return inputs;
}

Json run_here(
    const Task& task,
    const EvalArguments& arguments,
    const std::vector<eval::RunSpec>& specs) {
  const Inputs inputs = prepare(task, arguments, specs);
  const eval::RunSpec& spec = inputs.spec;
  ProgressBar bar(
      eval::is_bounded(spec.policy) ? spec.policy + " " + spec.budget.text
                                    : spec.policy);
  return task.run(arguments, inputs, [&](std::size_t done, std::size_t total) {
    bar.update(done, total);
  });
}

std::vector<Json> run_all(
    const Task& task, const EvalArguments& arguments, const CLI::App& command) {
  const std::vector<eval::RunSpec> specs = make_specs(arguments.run);
  if (specs.size() == 1) return {run_here(task, arguments, specs)};
  // Errors before the first run; what is loaded here is gone before it.
  (void)prepare(task, arguments, specs);
  std::vector<Candidate> candidates;
  candidates.reserve(specs.size());
  for (const eval::RunSpec& spec : specs) {
    candidates.push_back({spec.policy, spec.budget.text});
  }
  return run_each_alone(command, candidates);
}

void run_task(
    const Task& task, const EvalArguments& arguments, const CLI::App& command) {
  check_outputs(
      {arguments.run.common.json},
      {arguments.run.model, arguments.run.filters, arguments.text});
  task.check(arguments);
  const std::vector<Json> runs = run_all(task, arguments, command);
  Json json;
  json["task"] = task.name;
  json["runs"] = runs;
  write_json(arguments.run.common.json, json);
  if (!arguments.child) fmt::print("{}", make_table(task.name, runs));
}

void add_task(CLI::App& eval, const Task& task, Action& action) {
  CLI::App* const command = eval.add_subcommand(task.name, task.help);
  const auto arguments = std::make_shared<EvalArguments>();
  command->add_option("--text", arguments->text, "Text to read")
      ->type_name("FILE")
      ->required();
  add_count(
      *command,
      "--skip",
      arguments->skip,
      "Tokens of the text to leave out first");
  task.add_options(*command, *arguments);
  command
      ->add_option(
          "--protocol",
          arguments->run.protocol,
          "streaming: rows are evicted while the text comes in")
      ->capture_default_str();
  add_run_options(*command, arguments->run, Candidates::kList);
  command->add_flag(kChildFlag, arguments->child)->group("");
  command->callback([&action, &task, command, arguments] {
    action = [&task, command, arguments] {
      run_task(task, *arguments, *command);
    };
  });
}

}  // namespace

void add_eval_command(CLI::App& app, Action& action) {
  CLI::App* const eval = app.add_subcommand(
      "eval", "Measure quality, speed and memory of policies side by side");
  eval->require_subcommand(1);
  add_task(*eval, kPerplexity, action);
  add_task(*eval, kNeedle, action);
}

}  // namespace qfilters::cli
