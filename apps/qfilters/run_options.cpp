#include "run_options.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <system_error>

#include "qfilters/error.h"

namespace qfilters::cli {

CLI::Validator whole_number() {
  const auto check = [](std::string& input) {
    if (input.empty() ||
        input.find_first_not_of("0123456789") != std::string::npos) {
      return "'" + input + "' is not a whole number";
    }
    const std::size_t first = input.find_first_not_of('0');
    input.erase(0, std::min(first, input.size() - 1));
    std::uint64_t value = 0;
    const char* const end = input.data() + input.size();
    if (std::from_chars(input.data(), end, value).ec != std::errc()) {
      return "'" + input + "' is too large";
    }
    return std::string();
  };
  return {check, "", "whole_number"};
}

void add_common_options(CLI::App& command, CommonOptions& options) {
  command.add_option("--json", options.json, "Write one JSON object to FILE")
      ->type_name("FILE");
  command
      .add_option(
          "--threads",
          options.threads,
          "Threads; at most the physical cores that are free: a busy core or "
          "a second thread on one core makes it slower. Never changes a "
          "result")
      ->capture_default_str();
}

void add_model_options(
    CLI::App& command,
    std::string& model,
    int& gpu_layers,
    std::size_t& chunk) {
  command.add_option("--model", model, "Model, a GGUF file")
      ->type_name("FILE")
      ->required();
  command
      .add_option(
          "--gpu-layers",
          gpu_layers,
          "Layers on a GPU; refused unless 0: the cache reads host memory")
      ->capture_default_str();
  add_count(command, "--chunk", chunk, "Tokens per step of the prefill");
}

namespace {

void add_policy_options(
    CLI::App& command, RunOptions& options, Candidates candidates) {
  std::string names;
  for (const std::string& name : eval::policy_names()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  CLI::Option* const policy = command.add_option(
      "--policy",
      options.policies,
      "Which rows stay: " + names +
          ". llama: llama.cpp's own cache and attention; full: ours, every "
          "row kept");
  CLI::Option* const budget = command.add_option(
      "--budget",
      options.budgets,
      "Rows kept per KV head: a number, a share of all tokens to be seen (25%; "
      "in a chat, of the trained length) or memory of the whole KV cache at "
      "its "
      "peak (64MiB)");
  for (CLI::Option* const option : {policy, budget}) {
    option->allow_extra_args(false)->capture_default_str();
    if (candidates == Candidates::kList) {
      option->delimiter(',')->type_name("LIST");
    } else {
      option->expected(1)->type_name("TEXT");
    }
  }
}

void add_eviction_options(CLI::App& command, RunOptions& options) {
  add_count(command, "--sink", options.sinks, "First rows, never evicted");
  command
      .add_option(
          "--recent",
          options.recent,
          "Newest rows, never evicted [auto: 192, or half of the budget less "
          "32 if that is less, or a quarter if that is more; an eighth where "
          "other layers have windows; reconstruct: a quarter; streaming, tova, "
          "expected, squeeze: 0; snapkv, pyramidkv, chunkkv: 32; else half]")
      ->check(whole_number());
  command
      .add_option(
          "--interval",
          options.interval,
          "Evict once so many rows are held beyond the budget; 0: always [a "
          "sixteenth of the budget in whole blocks of 64, at least 64]")
      ->check(whole_number());
  command.add_option(
      "--rule",
      options.rule,
      "Who shares the budget: uniform (every head keeps the same number of "
      "rows), per-layer (the heads of a layer share) or shared (all heads) "
      "[auto, reconstruct: shared; else uniform]");
  command
      .add_option(
          "--floor",
          options.floor,
          "Share of the budget each head keeps in any case when heads share")
      ->capture_default_str();
  command
      .add_option(
          "--block",
          options.block,
          "Neighbouring rows chosen together [1; 10 for chunkkv]")
      ->check(whole_number());
  command.add_option(
      "--merge",
      options.merge,
      "What becomes of the values of rows that go: none, or cam (each is added "
      "to rows behind it, with chances by attention) [cam: cam; else none]");
  add_count(
      command,
      "--seed",
      options.seed,
      "Seed of sampling, of policy random, of --merge and of what `eval ruler` "
      "makes");
}

void add_cache_options(CLI::App& command, RunOptions& options) {
  command
      .add_option(
          "--cache-type",
          options.cache_type,
          "How rows are stored, but for policy llama: f16, or int8 in about "
          "half the memory, rounded")
      ->capture_default_str();
  command
      .add_option(
          "--llama-flash-attn",
          options.llama_flash_attention,
          "Policy llama: on or off; off is the faster one on CPUs")
      ->capture_default_str();
  command
      .add_option(
          "--llama-cache-type",
          options.llama_cache_type,
          "Policy llama: f16, bf16 or q8_0")
      ->capture_default_str();
}

}  // namespace

void add_run_options(
    CLI::App& command, RunOptions& options, Candidates candidates) {
  add_model_options(command, options.model, options.gpu_layers, options.chunk);
  command
      .add_option(
          "--filters",
          options.filters,
          "Filters of the model (.npz, .safetensors, .gguf) for policies auto, "
          "qfilters, expected and squeeze, each its own kind; may be repeated; "
          "see `qfilters calibrate`")
      ->allow_extra_args(false)
      ->type_name("FILE");
  add_policy_options(command, options, candidates);
  add_eviction_options(command, options);
  add_cache_options(command, options);
  add_common_options(command, options.common);
}

std::vector<eval::RunSpec> make_specs(const RunOptions& options) {
  eval::RunSpec base;
  base.sinks = options.sinks;
  base.recent = options.recent;
  base.interval = options.interval;
  base.rule = options.rule;
  base.floor = options.floor;
  base.block = options.block;
  base.merge = options.merge;
  base.chunk = options.chunk;
  base.threads = options.common.threads;
  base.seed = options.seed;
  base.protocol = options.protocol;
  base.cache_type = options.cache_type;
  base.llama_cache_type = options.llama_cache_type;
  base.llama_flash_attention = options.llama_flash_attention == "on";
  if (!base.llama_flash_attention && options.llama_flash_attention != "off") {
    throw Error(
        ErrorKind::kInvalidArgument,
        "llama-flash-attn: '" + options.llama_flash_attention +
            "' is neither on nor off");
  }
  std::vector<eval::RunSpec> specs;
  for (const std::string& policy : options.policies) {
    base.policy = policy;
    eval::check_spec(base);
    for (const std::string& budget : options.budgets) {
      base.budget = eval::parse_budget(budget);
      const bool again = !specs.empty() && specs.back().policy == policy;
      if (!again || eval::is_bounded(policy)) specs.push_back(base);
    }
  }
  return specs;
}

llama::ModelOptions model_options(const CommonOptions& common, int gpu_layers) {
  llama::ModelOptions options;
  options.threads = common.threads;
  options.gpu_layers = gpu_layers;
  return options;
}

void check_threads(int threads) {
  eval::RunSpec spec;
  spec.threads = threads;
  eval::check_spec(spec);
}

}  // namespace qfilters::cli
