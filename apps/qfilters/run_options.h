#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "eval/run.h"

namespace qfilters::cli {

/// What every command has.
struct CommonOptions {
  std::string json;
  int threads = 1;
};

/// What says how a model runs: for `generate` and `eval` alike.
struct RunOptions {
  CommonOptions common;
  std::string model;
  std::vector<std::string> filters;
  std::vector<std::string> policies{"auto"};
  std::vector<std::string> budgets{"1024"};
  std::size_t sinks = 4;
  std::optional<std::size_t> recent;
  std::optional<std::size_t> interval;
  std::optional<std::string> rule;
  double floor = 0.2;
  std::optional<std::size_t> block;
  std::optional<std::string> merge;
  std::size_t chunk = 256;
  std::uint64_t seed = 0;
  int gpu_layers = 0;
  std::string cache_type = "f16";
  std::string llama_flash_attention = "off";
  std::string llama_cache_type = "f16";
  std::string protocol = "streaming";
};

/// Takes digits only: CLI11 alone would wrap "-1" around and read "010" as 8.
[[nodiscard]] CLI::Validator whole_number();

/// Adds an option for a count, with its default in the help.
template <typename Count>
CLI::Option* add_count(
    CLI::App& command,
    const std::string& name,
    Count& count,
    const std::string& help) {
  return command.add_option(name, count, help)
      ->check(whole_number())
      ->capture_default_str();
}

void add_common_options(CLI::App& command, CommonOptions& options);

/// --model, --gpu-layers and --chunk, which `calibrate` shares.
void add_model_options(
    CLI::App& command, std::string& model, int& gpu_layers, std::size_t& chunk);

enum class Candidates {
  kOne,   ///< one policy, one budget
  kList,  ///< comma lists of both
};
void add_run_options(
    CLI::App& command, RunOptions& options, Candidates candidates);

/// One spec for each policy and budget; policies that keep every row appear
/// once. Throws Error for what can be refused without a model.
[[nodiscard]] std::vector<eval::RunSpec> make_specs(const RunOptions& options);

[[nodiscard]] llama::ModelOptions model_options(
    const CommonOptions& common, int gpu_layers);

/// Throws Error kInvalidArgument unless threads are in a sensible range.
void check_threads(int threads);

}  // namespace qfilters::cli
