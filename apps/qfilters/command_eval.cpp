#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "qfilters/error.h"

#include "commands.h"
#include "eval_sweep.h"
#include "eval_tasks.h"
#include "task_command.h"

namespace qfilters::cli {

namespace {

// perplexity

void add_perplexity_options(CLI::App& command, TaskArguments& arguments) {
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

void check_perplexity(const TaskArguments& arguments) {
  if (arguments.perplexity.tokens < 2) {
    throw Error(
        ErrorKind::kInvalidArgument, "perplexity: --tokens must be 2 or more");
  }
}

std::size_t perplexity_longest(
    const TaskArguments& arguments, const eval::Codec& /*codec*/) {
  return arguments.perplexity.tokens + arguments.perplexity.decode;
}

std::size_t perplexity_text(
    const TaskArguments& arguments, const eval::Codec& codec) {
  const std::size_t longest = perplexity_longest(arguments, codec);
  return longest - std::min(longest, codec.prefix.size());
}

Json run_perplexity_task(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
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

void add_needle_options(CLI::App& command, TaskArguments& arguments) {
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
  list(
      "--phrasings",
      arguments.needle.phrasings,
      "Which built-in needle and question, from 1, each")
      ->check(whole_number());
  list(
      "--skips",
      arguments.needle.skips,
      "Token of the text (after --skip) at which a haystack begins, each")
      ->check(whole_number());
}

void check_needle(const TaskArguments& arguments) {
  eval::check_needle_options(arguments.needle);
}

std::size_t needle_text(
    const TaskArguments& arguments, const eval::Codec& /*codec*/) {
  return eval::needle_text_tokens(arguments.needle);
}

std::size_t needle_longest(
    const TaskArguments& arguments, const eval::Codec& codec) {
  return eval::needle_tokens(codec, arguments.needle);
}

Json run_needle_task(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
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
  json["query"] = kQueryAgnostic;
  json["cells"] = Json::array();
  for (const eval::NeedleCell& cell : result.cells) {
    json["cells"].push_back(
        {{"length", cell.length},
         {"depth", cell.depth},
         {"key", cell.key},
         {"phrasing", cell.phrasing},
         {"skip", cell.skip},
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
    /*in_turns=*/false,
    add_perplexity_options,
    check_perplexity,
    perplexity_text,
    perplexity_longest,
    run_perplexity_task};

const Task kNeedle{
    "needle",
    "Whether a fact is recalled from a bounded cache",
    /*in_turns=*/false,
    add_needle_options,
    check_needle,
    needle_text,
    needle_longest,
    run_needle_task};

}  // namespace

void add_eval_command(CLI::App& app, Action& action) {
  CLI::App* const eval = app.add_subcommand(
      "eval", "Measure quality, speed and memory of policies side by side");
  eval->require_subcommand(1);
  const Tasks tasks{&kPerplexity, &kNeedle, &kRuler, &kQuestions};
  for (const Task* const task : tasks)
    add_task(*eval, *task, action);
  add_sweep_command(*eval, tasks, action);
  add_report_command(*eval, action);
}

}  // namespace qfilters::cli
