#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"

#include "commands.h"
#include "eval/tasks/one_shot.h"
#include "eval_sweep.h"
#include "eval_tasks.h"
#include "task_command.h"

namespace qfilters::cli {

std::unique_ptr<eval::Readers> make_readers(const TaskInputs& inputs) {
  const eval::Contender& first = inputs.contenders.front();
  if (eval::is_one_shot(first.spec)) {
    return std::make_unique<eval::OneShotReaders>(
        inputs.model, inputs.contenders, inputs.codec);
  }
  return std::make_unique<eval::StreamingReader>(
      [&](std::size_t tokens) {
        return eval::open_session(
            first.spec, inputs.model, first.filters, tokens);
      },
      inputs.codec);
}

Json make_run(
    const TaskInputs& inputs,
    const eval::Readers& readers,
    std::size_t reader,
    std::size_t tokens) {
  const eval::RunSpec& spec = inputs.contenders[reader].spec;
  eval::RunRecord record = eval::start_record(
      spec,
      eval::limits_of(spec, tokens, inputs.model->layer_shapes()),
      *inputs.model);
  eval::set_usage(record, readers.usage(reader));
  Json json = eval::to_json(record);
  json["query"] = kQueryAgnostic;
  return json;
}

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
  if (arguments.run.protocol == "one-shot" &&
      eval::perplexity_from(arguments.perplexity) == 0) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "perplexity: --from 0 leaves nothing that could be compressed");
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

Json perplexity_run(
    const TaskInputs& inputs,
    const eval::RunSpec& spec,
    const eval::PerplexityResult& result,
    eval::Usage usage) {
  usage.prefill_tokens += result.prefill_tokens;
  usage.decode_tokens += result.decode_tokens;
  usage.prefill_seconds += result.prefill_seconds;
  usage.decode_seconds += result.decode_seconds;
  eval::RunRecord record = eval::start_record(
      spec,
      eval::limits_of(
          spec,
          usage.prefill_tokens + usage.decode_tokens,
          inputs.model->layer_shapes()),
      *inputs.model);
  eval::set_usage(record, usage);
  Json json = eval::to_json(record);
  json["query"] = kQueryAgnostic;
  json["perplexity"] = result.perplexity;
  json["mean_nll"] = result.mean_nll;
  json["predictions"] = result.predictions;
  return json;
}

std::vector<Json> run_perplexity_task(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  std::vector<eval::Token> tokens = inputs.codec.prefix;
  tokens.insert(tokens.end(), inputs.text.begin(), inputs.text.end());
  const auto predict = [&](llama::Session& session, std::size_t i) {
    const std::size_t before = i * tokens.size();
    const std::size_t total = inputs.contenders.size() * tokens.size();
    return eval::run_perplexity(
        session,
        tokens,
        inputs.codec.vocabulary,
        arguments.perplexity,
        [&](std::size_t done, std::size_t) { progress(before + done, total); });
  };
  std::optional<eval::OneShotContext> context;
  if (eval::is_one_shot(inputs.contenders.front().spec)) {
    context.emplace(
        inputs.model,
        inputs.contenders,
        std::span(tokens).first(eval::perplexity_from(arguments.perplexity)),
        tokens.size());
  }
  std::vector<Json> runs;
  for (std::size_t i = 0; i < inputs.contenders.size(); ++i) {
    const auto& [spec, filters] = inputs.contenders[i];
    eval::Usage usage;
    const std::unique_ptr<llama::Session> session =
        context
            ? context->open(i, usage)
            : eval::open_session(spec, inputs.model, filters, tokens.size());
    const eval::PerplexityResult result = predict(*session, i);
    usage.stats = session->stats();
    runs.push_back(perplexity_run(inputs, spec, result, std::move(usage)));
  }
  return runs;
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

std::vector<Json> run_needle_task(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const std::unique_ptr<eval::Readers> readers = make_readers(inputs);
  const std::vector<eval::NeedleResult> results = eval::run_needle(
      *readers, inputs.codec, inputs.text, arguments.needle, progress);
  const std::size_t longest = needle_longest(arguments, inputs.codec);
  std::vector<Json> runs;
  for (const eval::NeedleResult& result : results) {
    Json json = make_run(inputs, *readers, runs.size(), longest);
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
    runs.push_back(std::move(json));
  }
  return runs;
}

const Task kPerplexity{
    "perplexity",
    "How well a text is predicted from a bounded cache",
    /*in_turns=*/false,
    add_perplexity_options,
    check_perplexity,
    perplexity_text,
    perplexity_longest,
    run_perplexity_task,
    /*reads_text=*/true,
    /*load=*/nullptr,
    /*check_runs=*/nullptr,
    /*together=*/false,
    /*one_shot=*/true};

const Task kNeedle{
    "needle",
    "Whether a fact is recalled from a bounded cache",
    /*in_turns=*/false,
    add_needle_options,
    check_needle,
    needle_text,
    needle_longest,
    run_needle_task,
    /*reads_text=*/true,
    /*load=*/nullptr,
    /*check_runs=*/nullptr,
    /*together=*/false,
    /*one_shot=*/true};

}  // namespace

void add_eval_command(CLI::App& app, Action& action) {
  CLI::App* const eval = app.add_subcommand(
      "eval", "Measure quality, speed and memory of policies side by side");
  eval->require_subcommand(1);
  const Tasks tasks{&kPerplexity, &kNeedle, &kRuler, &kQuestions, &kFidelity};
  for (const Task* const task : tasks)
    add_task(*eval, *task, action);
  add_sweep_command(*eval, tasks, action);
  add_report_command(*eval, action);
}

}  // namespace qfilters::cli
