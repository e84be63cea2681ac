#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "qfilters/error.h"
#include "qfilters/limits.h"
#include "qfilters/snapshot_file.h"

#include "chat.h"
#include "commands.h"
#include "eval/run.h"
#include "generation.h"
#include "interrupt.h"
#include "output.h"
#include "run_options.h"
#include "state_file.h"

namespace qfilters::cli {

namespace {

struct GenerateArguments {
  RunOptions run;
  GenerationOptions generation;
  std::optional<std::string> prompt;
  std::string prompt_file;
  bool chat = false;
  std::string load_state;
  std::string save_state;
  bool seed_given = false;

  [[nodiscard]] bool keeps_state() const {
    return !load_state.empty() || !save_state.empty();
  }
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "generate: " + message);
}

std::string read_prompt_file(const GenerateArguments& arguments) {
  if (arguments.prompt_file == "-") {
    return {std::istreambuf_iterator<char>(std::cin), {}};
  }
  if (std::filesystem::is_directory(arguments.prompt_file)) {
    throw Error(
        ErrorKind::kFile,
        "generate: cannot read " + arguments.prompt_file + ": a directory");
  }
  std::ifstream file(arguments.prompt_file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) {
    throw Error(
        ErrorKind::kFile,
        "generate: cannot read " + arguments.prompt_file + ": " +
            std::strerror(errno));
  }
  return text;
}

void check(const GenerateArguments& arguments) {
  const bool prompted = arguments.prompt || !arguments.prompt_file.empty();
  if (arguments.chat && prompted) {
    refuse("--chat takes its messages from stdin, not from a prompt");
  }
  if (!arguments.chat && !prompted && arguments.load_state.empty()) {
    refuse("give --prompt, --prompt-file, --chat or --load-state");
  }
  // The state that was loaded may be replaced by what became of it.
  std::vector<std::string> inputs = arguments.run.filters;
  inputs.insert(inputs.end(), {arguments.run.model, arguments.prompt_file});
  check_outputs({arguments.run.common.json, arguments.save_state}, inputs);
  inputs.push_back(arguments.load_state);
  check_outputs({arguments.run.common.json}, inputs);
  if (arguments.generation.tokens > kMostTokens) {
    refuse("-n must be at most " + std::to_string(kMostTokens));
  }
  // Refuses bad values before the model is loaded.
  (void)Sampler(arguments.generation.sampling, {});
}

void check_state(
    const GenerateArguments& arguments, const eval::RunSpec& spec) {
  if (!arguments.keeps_state()) return;
  if (spec.policy == "llama") {
    refuse(
        "the state of llama.cpp's own cache can be neither saved nor loaded");
  }
  if (eval::is_bounded(spec.policy) &&
      spec.budget.kind == eval::Budget::Kind::kShare) {
    refuse(
        "--budget " + spec.budget.text +
        " depends on the length of a run; a state needs rows or memory");
  }
}

using Prompts = std::vector<std::vector<llama::Token>>;

std::size_t count_tokens(const Prompts& prompts) {
  std::size_t count = 0;
  for (const auto& prompt : prompts)
    count += prompt.size();
  return count;
}

/// The file's prompt, then the other, each fed by itself: so a run that loads
/// the state after the first computes the same. Control tokens written out in
/// a prompt count as such: the prompt is the user's own.
Prompts prompt_tokens(
    const GenerateArguments& arguments, const llama::Model& model) {
  std::vector<std::string> texts;
  if (!arguments.prompt_file.empty()) {
    texts.push_back(read_prompt_file(arguments));
  }
  if (arguments.prompt) texts.push_back(*arguments.prompt);
  Prompts prompts;
  for (const std::string& text : texts) {
    const bool bos = prompts.empty() && arguments.load_state.empty();
    if (model.tokenize(text, false, true).empty()) {
      refuse("the prompt is empty");
    }
    prompts.push_back(model.tokenize(text, bos, true));
  }
  return prompts;
}

struct Outcome {
  Stop stop = Stop::kLength;
  bool cut = false;  // interrupted before all of the input was in
  std::size_t turns = 1;
};

Outcome run_prompts(
    Generation& generation,
    const Prompts& prompts,
    const Generation::Write& write) {
  Outcome outcome;
  for (const std::vector<llama::Token>& prompt : prompts) {
    ProgressBar bar("prefill");
    const bool fed = generation.feed(
        prompt,
        [&](std::size_t done, std::size_t total) { bar.update(done, total); });
    if (fed) continue;
    outcome.stop = Stop::kInterrupted;
    outcome.cut = !generation.can_save() || &prompt != &prompts.back();
    return outcome;
  }
  outcome.stop = generation.answer(write).stop;
  return outcome;
}

Outcome run_turns(
    Generation& generation,
    Conversation& conversation,
    const Generation::Write& write,
    const std::function<void()>& turn_done) {
  ProgressBar bar("prefill");
  const ChatResult chat = run_chat(
      generation,
      conversation,
      write,
      [&](std::size_t done, std::size_t total) {
        if (done < total) {
          bar.update(done, total);
        } else {
          bar.clear();
        }
      },
      turn_done);
  return {chat.stop, chat.cut, chat.turns};
}

/// Tokens of the sequence that came from a state file.
std::size_t loaded_tokens(
    const eval::RunRecord& record, const Generation& generation) {
  return record.stats.tokens - generation.fed_tokens() -
         generation.decoded_tokens();
}

Json to_json(
    const eval::RunRecord& record,
    const Generation& generation,
    const Outcome& outcome,
    const std::string& text) {
  Json json = eval::to_json(record);
  json["loaded_tokens"] = loaded_tokens(record, generation);
  json["prompt_tokens"] = generation.fed_tokens();
  json["generated_tokens"] = generation.generated_tokens();
  json["turns"] = outcome.turns;
  json["stop"] = to_string(outcome.stop);
  const std::optional<double> first = generation.first_token_seconds();
  json["seconds"]["first_token"] = first ? Json(*first) : Json(nullptr);
  json["text"] = text;
  return json;
}

void print_time(
    const eval::RunRecord& record, const std::optional<double>& first) {
  const auto rate = [](std::size_t tokens, double seconds) {
    return tokens > 0 && seconds > 0
               ? fmt::format("{:.1f}", static_cast<double>(tokens) / seconds)
               : std::string("-");
  };
  if (first) fmt::print(stderr, "first token   after {:.2f} s\n", *first);
  fmt::print(
      stderr,
      "tokens/s      prefill {}, decode {}\n",
      rate(record.prefill_tokens, record.prefill_seconds),
      rate(record.decode_tokens, record.decode_seconds));
  const double seconds = record.prefill_seconds + record.decode_seconds;
  if (record.spec.policy == "llama" || seconds <= 0) return;
  fmt::print(
      stderr,
      "time in       attention {:.1f} %, eviction {:.1f} %\n",
      100 * record.stats.attention_seconds / seconds,
      100 * record.stats.eviction_seconds / seconds);
}

void print_summary(
    const eval::RunRecord& record,
    const Generation& generation,
    const Outcome& outcome) {
  const llama::SessionStats& stats = record.stats;
  fmt::print(stderr, "\npolicy        {}", record.spec.policy);
  if (record.limits) {
    fmt::print(
        stderr,
        " (budget {}, sink {}, recent {}, interval {})",
        record.limits->budget,
        record.limits->sinks,
        record.limits->recent,
        record.limits->interval);
  }
  const std::string merge = record.spec.merge.value_or("none");
  if (record.limits && merge != "none") {
    fmt::print(stderr, ", values merged by {}", merge);
  }
  if (record.spec.cache_type != "f16") {
    fmt::print(stderr, ", rows as {}", record.spec.cache_type);
  }
  fmt::print(
      stderr,
      "\ntokens seen   {} ({}generated {}, stopped: {})\n",
      stats.tokens,
      loaded_tokens(record, generation) == 0
          ? ""
          : fmt::format("loaded {}, ", loaded_tokens(record, generation)),
      generation.generated_tokens(),
      to_string(outcome.stop));
  fmt::print(
      stderr,
      "rows kept     {:.0f} per head ({} to {}), {} evictions\n",
      stats.rows_mean,
      stats.rows_min,
      stats.rows_max,
      stats.evictions);
  fmt::print(
      stderr,
      "KV cache      {} at its peak with the cells of a step, {} if no row had "
      "gone\n",
      mebibytes(stats.kv_bytes_peak),
      mebibytes(stats.kv_bytes_full));
  print_time(record, generation.first_token_seconds());
  fmt::print(stderr, "peak memory   {}\n", mebibytes(eval::peak_rss_bytes()));
}

/// How long the sequence can get. A chat has no end of its own: shares are of
/// the trained length, which is also what llama.cpp's own cache can hold.
std::size_t sequence_tokens(
    const GenerateArguments& arguments,
    const Prompts& prompts,
    const llama::Model& model) {
  if (arguments.chat) return model.trained_length();
  return count_tokens(prompts) + arguments.generation.tokens;
}

/// Goes on from a loaded state; see restore_state(). Errors name the file.
std::string resume(
    const GenerateArguments& arguments,
    const Snapshot& loaded,
    Generation& generation,
    Conversation& conversation) {
  try {
    return restore_state(
        loaded, arguments.seed_given, generation, conversation);
  } catch (const Error& error) {
    throw Error(error.kind(), arguments.load_state + ": " + error.what());
  }
}

eval::RunRecord make_record(
    const eval::RunSpec& spec,
    const std::optional<eval::Limits>& limits,
    const llama::Session& session,
    const Generation& generation) {
  eval::RunRecord record = eval::start_record(spec, limits, session.model());
  record.stats = session.stats();
  record.prefill_tokens = generation.fed_tokens();
  record.decode_tokens = generation.decoded_tokens();
  record.prefill_seconds = generation.feed_seconds();
  record.decode_seconds = generation.decode_seconds();
  return record;
}

/// What was loaded may be at the end of the trained length; then nothing more
/// comes, which is no error.
void check_room(
    const Generation& generation,
    const Prompts& prompts,
    const llama::Session& session) {
  const std::size_t tokens = count_tokens(prompts);
  if (tokens == 0 || generation.has_room(tokens)) return;
  refuse(
      "the prompt's " + std::to_string(tokens) + " tokens, after " +
      std::to_string(session.tokens().size()) +
      ", exceed the trained length of " +
      std::to_string(session.model().trained_length()));
}

/// A run that was to leave a state and did not has failed.
void check_state_kept(const StateFile& state, const Outcome& outcome) {
  if (!state.wanted()) return;
  if (!state.written()) {
    throw Error(
        ErrorKind::kRuntime,
        outcome.cut
            ? "generate: no state saved: interrupted before the prompt was in"
            : "generate: no state saved: there was no input");
  }
  if (outcome.cut) {
    warn("the saved state ends before the last message, which has no answer");
  }
}

void generate(const GenerateArguments& arguments) {
  check(arguments);
  const eval::RunSpec spec = make_specs(arguments.run).front();
  check_state(arguments, spec);
  std::optional<Snapshot> loaded;
  if (!arguments.load_state.empty()) {
    loaded = load_snapshot(arguments.load_state);
  }
  GenerationOptions options = arguments.generation;
  options.sampling.seed = arguments.run.seed;
  if (arguments.chat && spec.policy == "llama") {
    options.stop_at_trained_length = true;
  }
  const std::shared_ptr<const llama::Model> model = llama::Model::load(
      arguments.run.model,
      model_options(arguments.run.common, arguments.run.gpu_layers));
  const Prompts prompts = prompt_tokens(arguments, *model);
  const std::size_t tokens = sequence_tokens(arguments, prompts, *model);
  const std::optional<eval::Limits> limits =
      eval::limits_of(spec, tokens, model->layer_shapes());
  const std::unique_ptr<llama::Session> session = eval::open_session(
      spec,
      model,
      eval::load_run_filters(spec.policy, arguments.run.filters, *model),
      tokens);

  Generation generation(*session, options);
  Conversation conversation(*model);
  Stdout out;
  if (loaded) {
    const std::string unfinished =
        resume(arguments, *loaded, generation, conversation);
    if (prompts.empty() && !arguments.chat) out.write(unfinished);
    loaded.reset();
  }
  check_room(generation, prompts, *session);

  const InterruptGuard guard(InterruptGuard::Mode::kOnce);
  StateFile state(arguments.save_state, generation, conversation);
  const auto write = [&](std::string_view piece) { out.write(piece); };
  const Outcome outcome =
      arguments.chat
          ? run_turns(generation, conversation, write, [&] { state.write(); })
          : run_prompts(generation, prompts, write);
  const bool keeps = !outcome.cut && !state.written() && generation.can_save();
  if (keeps) state.write(out.held());
  // A character that goes on in the saved state is not broken off here.
  if (!state.written() || arguments.chat) out.finish();
  const std::string text = out.text();
  if (!arguments.chat && !text.empty()) out.end_line();

  const eval::RunRecord record =
      make_record(spec, limits, *session, generation);
  write_json(
      arguments.run.common.json, to_json(record, generation, outcome, text));
  print_summary(record, generation, outcome);
  check_state_kept(state, outcome);
}

void add_prompt_options(CLI::App& command, GenerateArguments& arguments) {
  command.add_option("--prompt", arguments.prompt, "Text to continue")
      ->type_name("TEXT");
  command
      .add_option(
          "--prompt-file",
          arguments.prompt_file,
          "The same from a file, - is stdin; comes before --prompt")
      ->type_name("FILE");
  command.add_flag(
      "--chat",
      arguments.chat,
      "Answer each line of stdin with the model's own chat template; the cache "
      "is carried over");
}

void add_sampling_options(CLI::App& command, GenerationOptions& options) {
  add_count(
      command, "-n,--predict", options.tokens, "Most tokens of one answer");
  command
      .add_option(
          "--temp", options.sampling.temperature, "0: the most likely token")
      ->capture_default_str();
  add_count(
      command,
      "--top-k",
      options.sampling.top_k,
      "Sample from so many; 0: all");
  command
      .add_option(
          "--top-p", options.sampling.top_p, "Sample from this much of them")
      ->capture_default_str();
  command.add_flag(
      "--ignore-eos", options.ignore_end, "Never end before -n tokens");
  command.add_flag(
      "--stop-at-trained-length",
      options.stop_at_trained_length,
      "Stop where the model's trained length ends instead of warning");
}

void add_state_options(CLI::App& command, GenerateArguments& arguments) {
  const auto a_name = [](const std::string& path) {
    return path.empty() ? "no file is named" : "";
  };
  command
      .add_option(
          "--save-state",
          arguments.save_state,
          "Write the whole state at the end: cache, tokens, sampler; in a chat "
          "after each answer")
      ->type_name("FILE")
      ->check(a_name);
  command
      .add_option(
          "--load-state",
          arguments.load_state,
          "Start from a saved state; model, filters, policy and limits must be "
          "its own, sampling options are given again")
      ->type_name("FILE")
      ->check(a_name);
}

}  // namespace

void add_generate_command(CLI::App& app, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "generate", "Continue a text or chat in a bounded cache");
  const auto arguments = std::make_shared<GenerateArguments>();
  add_prompt_options(*command, *arguments);
  add_sampling_options(*command, arguments->generation);
  add_state_options(*command, *arguments);
  add_run_options(*command, arguments->run, Candidates::kOne);
  command->callback([&action, arguments, command] {
    arguments->seed_given = command->count("--seed") > 0;
    action = [arguments] { generate(*arguments); };
  });
}

}  // namespace qfilters::cli
