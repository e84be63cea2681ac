#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"

#include "eval/replay.h"
#include "eval/tasks/fidelity.h"
#include "eval/tasks/scoring.h"
#include "eval_tasks.h"
#include "llama/capture.h"
#include "task_command.h"

namespace qfilters::cli {

namespace {

void add_options(CLI::App& command, TaskArguments& arguments) {
  add_count(
      command,
      "--tokens",
      arguments.fidelity.tokens,
      "Tokens of the text that policies keep a part of");
  add_count(
      command,
      "--later",
      arguments.fidelity.later,
      "Tokens that follow, whose queries attend to it");
}

void check(const TaskArguments& arguments) {
  eval::check_fidelity_options(arguments.fidelity);
  for (const std::string& policy : arguments.run.policies) {
    if (policy != "llama") continue;
    throw Error(
        ErrorKind::kInvalidArgument,
        "fidelity: policy llama keeps rows of its own; full is the one that "
        "keeps all");
  }
}

/// Budgets are shares of the context: what follows is never evicted.
std::size_t longest(
    const TaskArguments& arguments, const eval::Codec& /*codec*/) {
  return arguments.fidelity.tokens;
}

std::size_t text_tokens(
    const TaskArguments& arguments, const eval::Codec& codec) {
  const std::size_t all = arguments.fidelity.tokens + arguments.fidelity.later;
  return all - std::min(all, codec.prefix.size());
}

struct Entrant {
  eval::RunSpec spec;
  Policy policy;
};

std::vector<Entrant> make_entrants(
    const TaskInputs& inputs, std::size_t tokens) {
  std::vector<Entrant> entrants;
  for (const auto& [spec, filters] : inputs.contenders) {
    entrants.push_back(
        {spec,
         eval::make_policy(
             spec, filters, inputs.model->layer_shapes(), tokens)});
    if (entrants.back().policy.rehearses()) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "fidelity: policy " + spec.policy +
              " reads the text a second time, which captured tensors cannot");
    }
  }
  return entrants;
}

void check_runs(const TaskArguments& arguments, const TaskInputs& inputs) {
  static_cast<void>(make_entrants(inputs, arguments.fidelity.tokens));
}

Json to_json(const eval::FidelityResult& result) {
  Json correlation = Json::array();
  for (const auto& layer : result.rank_correlation) {
    Json heads = Json::array();
    for (const std::optional<double>& head : layer) {
      heads.push_back(head ? Json(*head) : Json(nullptr));
    }
    correlation.push_back(std::move(heads));
  }
  return {
      {"error", result.error},
      {"rank_correlation", std::move(correlation)},
      {"rows", result.rows}};
}

Json run_entrant(
    const Entrant& entrant,
    const eval::Fidelity& fidelity,
    eval::Replay& replay,
    eval::RunRecord record) {
  const eval::RunSpec& spec = entrant.spec;
  const Policy& policy = entrant.policy;
  const RowFormat format = eval::format_of(spec);
  std::unique_ptr<SequenceCache> cache;
  eval::timed(record.stats.eviction_seconds, [&] {
    cache = eval::is_one_shot(spec)
                ? replay.one_shot(policy, format)
                : replay.streaming(policy, spec.chunk, format);
  });
  const double seconds = record.stats.eviction_seconds;
  record.stats = llama::stats_of(*cache);
  record.stats.eviction_seconds = seconds;
  if (eval::is_one_shot(spec)) {
    record.kv_bytes_compressed = cache->stats().kv_bytes;
    record.stats.kv_bytes_peak = replay.capture().kv_bytes_peak;
  }
  const eval::FidelityResult result = fidelity.measure(policy, *cache);
  Json json = eval::to_json(record);
  json.erase("tokens_per_second");
  json["later"] = replay.capture().tokens - replay.context();
  json["fidelity"] = to_json(result);
  json["mean_error"] = result.mean_error;
  json["mean_rank_correlation"] = result.mean_rank_correlation
                                      ? Json(*result.mean_rank_correlation)
                                      : Json(nullptr);
  return json;
}

std::vector<Json> run(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const std::size_t context = arguments.fidelity.tokens;
  const std::vector<Entrant> entrants = make_entrants(inputs, context);
  std::vector<eval::Token> tokens = inputs.codec.prefix;
  tokens.insert(tokens.end(), inputs.text.begin(), inputs.text.end());
  std::size_t first_query = context;
  for (const auto& [spec, policy] : entrants) {
    first_query = std::min(
        first_query,
        eval::first_query_needed(policy, context, !eval::is_one_shot(spec)));
  }
  const eval::RunSpec& any = entrants.front().spec;
  llama::SessionOptions options;
  options.chunk = any.chunk;
  options.threads = any.threads;
  const std::size_t total = tokens.size() + entrants.size() * context;
  double seconds = 0;
  llama::Capture capture;
  eval::timed(seconds, [&] {
    capture = llama::capture(
        inputs.model, tokens, first_query, options, [&](std::size_t done) {
          progress(done, total);
        });
  });
  eval::Replay replay(capture, context, any.threads);
  const eval::Fidelity fidelity(replay);
  std::vector<Json> runs;
  for (const Entrant& entrant : entrants) {
    eval::RunRecord record = eval::start_record(
        entrant.spec,
        eval::limits_of(entrant.spec, context, inputs.model->layer_shapes()),
        *inputs.model);
    record.prefill_tokens = tokens.size();
    record.prefill_seconds = seconds;
    runs.push_back(run_entrant(entrant, fidelity, replay, std::move(record)));
    progress(tokens.size() + runs.size() * context, total);
  }
  return runs;
}

}  // namespace

const Task kFidelity{
    "fidelity",
    "How near attention over the rows kept comes to attention over all",
    /*in_turns=*/false,
    add_options,
    check,
    text_tokens,
    longest,
    run,
    /*reads_text=*/true,
    /*load=*/nullptr,
    check_runs,
    /*together=*/true,
    /*one_shot=*/true};

}  // namespace qfilters::cli
