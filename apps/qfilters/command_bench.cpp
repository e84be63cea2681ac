#include <memory>
#include <vector>

#include "commands.h"
#include "task_command.h"

namespace qfilters::cli {

namespace {

void add_decode_options(CLI::App& command, TaskArguments& arguments) {
  command
      .add_option(
          "--contexts",
          arguments.decode.contexts,
          "Tokens in the sequence when decoding is timed, each")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST")
      ->capture_default_str()
      ->check(whole_number());
  add_count(
      command,
      "--decode",
      arguments.decode.tokens,
      "Tokens to decode one by one at each");
}

void check_decode(const TaskArguments& arguments) {
  eval::check_decode_options(arguments.decode);
}

std::size_t decode_longest(
    const TaskArguments& arguments, const eval::Codec& /*codec*/) {
  return eval::decode_text_tokens(arguments.decode);
}

std::vector<Json> run_decode_task(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const auto& [spec, filters] = inputs.contenders.front();
  const std::size_t tokens = inputs.text.size();
  const std::unique_ptr<llama::Session> session =
      eval::open_session(spec, inputs.model, filters, tokens);
  const std::vector<eval::DecodePoint> points =
      eval::run_decode(*session, inputs.text, arguments.decode, progress);
  eval::RunRecord record = eval::start_record(
      spec,
      eval::limits_of(spec, tokens, inputs.model->layer_shapes()),
      *inputs.model);
  record.stats = session->stats();
  record.prefill_tokens = points.back().prefill_tokens;
  record.prefill_seconds = points.back().prefill_seconds;
  for (const eval::DecodePoint& point : points) {
    record.decode_tokens += arguments.decode.tokens;
    record.decode_seconds += point.decode_seconds;
  }
  Json json = eval::to_json(record);
  const auto decoded = static_cast<double>(arguments.decode.tokens);
  double decode_seconds = 0;
  for (const eval::DecodePoint& point : points) {
    decode_seconds += point.decode_seconds;
    const double seconds = point.prefill_seconds + decode_seconds;
    json["points"].push_back(
        {{"context", point.context},
         {"tokens_per_second",
          {{"prefill",
            static_cast<double>(point.prefill_tokens) / point.prefill_seconds},
           {"decode", decoded / point.decode_seconds}}},
         {"share",
          {{"attention", point.attention_seconds / seconds},
           {"eviction", point.eviction_seconds / seconds}}},
         {"kv_bytes_peak", point.kv_bytes_peak}});
  }
  return {std::move(json)};
}

const Task kDecode{
    "decode",
    "Speed and memory at several lengths; every candidate runs at once, step "
    "by step in turn",
    /*in_turns=*/true,
    add_decode_options,
    check_decode,
    decode_longest,
    decode_longest,
    run_decode_task};

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  CLI::App* const bench =
      app.add_subcommand("bench", "Time policies side by side");
  bench->require_subcommand(1);
  add_task(*bench, kDecode, action);
}

}  // namespace qfilters::cli
