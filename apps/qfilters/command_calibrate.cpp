#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "qfilters/error.h"
#include "qfilters/filter_file.h"

#include "commands.h"
#include "eval/text.h"
#include "llama/calibrate.h"
#include "llama/cue.h"
#include "llama/filter_kind.h"
#include "llama/model.h"
#include "output.h"
#include "run_options.h"

namespace qfilters::cli {

namespace {

struct CalibrateArguments {
  CommonOptions common;
  std::string model;
  std::string text;
  std::vector<std::string> outputs;
  std::size_t tokens = 16384;
  std::size_t skip = 0;
  std::size_t context = 4096;
  std::size_t chunk = 256;
  int gpu_layers = 0;
  std::string policy = "auto";
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "calibrate: " + message);
}

void check(const CalibrateArguments& arguments) {
  check_threads(arguments.common.threads);
  for (const std::string& output : arguments.outputs) {
    check_filter_extension(output);
  }
  std::vector<std::string> outputs = arguments.outputs;
  outputs.push_back(arguments.common.json);
  check_outputs(outputs, {arguments.model, arguments.text});
  if (arguments.chunk == 0) refuse("--chunk must be 1 or more");
  if (arguments.tokens < 2) refuse("--tokens must be 2 or more");
  if (llama::kind_of_policy(arguments.policy)) return;
  std::string known;
  for (const llama::FilterKind kind : llama::filter_kinds()) {
    known += (known.empty() ? "" : ", ") + std::string(to_string(kind));
  }
  refuse("--policy '" + arguments.policy + "' is not one of " + known);
}

/// Not every format holds layers of different shapes; better said before the
/// work.
void check_shapes(
    const std::vector<std::string>& outputs, const llama::Model& model) {
  const std::vector<QueryShape> shapes = model.query_shapes();
  const bool uniform =
      std::all_of(shapes.begin(), shapes.end(), [&](const QueryShape& shape) {
        return shape.kv_heads == shapes.front().kv_heads &&
               shape.dim == shapes.front().dim;
      });
  for (const std::string& output : outputs) {
    const std::filesystem::path extension =
        std::filesystem::path(output).extension();
    if (!uniform && extension != ".npz" && extension != ".gguf") {
      refuse(
          "the model's layers differ in shape: --out must end in .npz or "
          ".gguf");
    }
  }
}

/// Text tokens cut into passages, each begun as the model wants a text begun.
std::vector<eval::Token> passages(
    const eval::Codec& codec,
    const std::vector<eval::Token>& text,
    std::size_t context) {
  if (context <= codec.prefix.size()) {
    refuse("--context " + std::to_string(context) + " is too small");
  }
  const std::size_t step = context - codec.prefix.size();
  std::vector<eval::Token> tokens;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (i % step == 0) {
      tokens.insert(tokens.end(), codec.prefix.begin(), codec.prefix.end());
    }
    tokens.push_back(text[i]);
  }
  return tokens;
}

Json summary(
    const CalibrateArguments& arguments,
    const FilterBank& filters,
    double seconds) {
  const FilterMetadata& metadata = filters.metadata();
  Json json;
  json["command"] = "calibrate";
  json["policy"] = arguments.policy;
  json["outputs"] = arguments.outputs;
  json["fingerprint"] = filters.fingerprint();
  json["tokens"] = arguments.tokens;
  json["skip"] = arguments.skip;
  json["context"] = arguments.context;
  json["n_samples"] = metadata.n_samples;
  json["dataset"] = metadata.dataset;
  json["text_hash"] = metadata.text_hash;
  json["query_site"] = metadata.query_site;
  json["seconds"] = seconds;
  json["peak_rss_bytes"] = eval::peak_rss_bytes();
  json["model"] = {
      {"name", metadata.model_id},
      {"fingerprint", metadata.model_fingerprint},
      {"layers", filters.layers()},
      {"kv_heads", filters.layer(0).heads},
      {"head_dim", filters.layer(0).dim}};
  return json;
}

void calibrate(const CalibrateArguments& arguments) {
  check(arguments);
  const auto start = std::chrono::steady_clock::now();
  const std::shared_ptr<const llama::Model> model = llama::Model::load(
      arguments.model, model_options(arguments.common, arguments.gpu_layers));
  check_shapes(arguments.outputs, *model);
  const eval::Codec codec = eval::make_codec(model);
  FilterMetadata metadata;
  metadata.dataset = std::filesystem::path(arguments.text).filename().string();
  metadata.text_hash = eval::hash_file(arguments.text);
  const std::vector<eval::Token> tokens = passages(
      codec,
      eval::read_tokens(
          arguments.text, codec, arguments.skip, arguments.tokens),
      arguments.context);

  llama::CalibrateOptions options;
  options.context = arguments.context;
  options.chunk = arguments.chunk;
  options.threads = arguments.common.threads;
  ProgressBar bar("calibrate");
  const auto progress = [&](std::size_t done) {
    bar.update(done, tokens.size());
  };
  const auto find_filters = [&] {
    switch (*llama::kind_of_policy(arguments.policy)) {
      case llama::FilterKind::kAuto:
        return llama::calibrate_reconstruction(
            model,
            tokens,
            codec.tokenize(llama::kCue),
            options,
            metadata,
            progress);
      case llama::FilterKind::kExpected:
        return llama::calibrate_expected(
            model, tokens, options, metadata, progress);
      case llama::FilterKind::kSqueeze:
        return llama::calibrate_squeeze(
            model, tokens, options, metadata, progress);
      case llama::FilterKind::kQFilters:
        break;
    }
    return llama::calibrate(model, tokens, options, metadata, progress);
  };
  const FilterBank filters = find_filters();
  bar.clear();
  for (const std::string& output : arguments.outputs) {
    save_filters(filters, output);
  }
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  write_json(arguments.common.json, summary(arguments, filters, took.count()));
  fmt::print(
      "{}: filters for {} layers of {} heads of {} from {} tokens in {:.1f} "
      "s\n",
      model->name(),
      filters.layers(),
      filters.layer(0).heads,
      filters.layer(0).dim,
      arguments.tokens,
      took.count());
  for (const std::string& output : arguments.outputs) {
    fmt::print("wrote {} ({})\n", output, filters.fingerprint());
  }
}

}  // namespace

void add_calibrate_command(CLI::App& app, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "calibrate", "Find a model's filters from a text, once per model");
  const auto arguments = std::make_shared<CalibrateArguments>();
  add_model_options(
      *command, arguments->model, arguments->gpu_layers, arguments->chunk);
  command
      ->add_option("--text", arguments->text, "Text like the model's real use")
      ->type_name("FILE")
      ->required();
  command
      ->add_option(
          "--out",
          arguments->outputs,
          "Filter file to write, .npz, .safetensors or .gguf; may be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->required();
  command
      ->add_option(
          "--policy",
          arguments->policy,
          "Whose filters: auto, which reads the text twice, qfilters, expected "
          "or squeeze")
      ->capture_default_str();
  add_count(
      *command, "--tokens", arguments->tokens, "Tokens of the text to use");
  add_count(
      *command,
      "--skip",
      arguments->skip,
      "Tokens of the text to leave out first");
  add_count(
      *command,
      "--context",
      arguments->context,
      "Tokens of one passage; passages do not see each other. Best as long as "
      "the sequences to come: filters depend on positions");
  add_common_options(*command, arguments->common);
  command->callback([&action, arguments] {
    action = [arguments] { calibrate(*arguments); };
  });
}

}  // namespace qfilters::cli
