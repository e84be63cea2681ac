#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "qfilters/filter_file.h"

#include "commands.h"
#include "output.h"
#include "run_options.h"

namespace qfilters::cli {

namespace {

struct ConvertArguments {
  CommonOptions common;
  std::string input;
  std::string output;
  std::string sign;
  std::optional<std::string> model_id;
};

std::optional<FilterSign> sign_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return name == "negated" ? FilterSign::kNegated : FilterSign::kPositive;
}

FilterBank renamed(const FilterBank& filters, const std::string& model_id) {
  std::vector<LayerFilters> layers;
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    layers.push_back(filters.layer(l));
  }
  FilterMetadata metadata = filters.metadata();
  metadata.model_id = model_id;
  return {std::move(layers), std::move(metadata)};
}

void convert(const ConvertArguments& arguments) {
  check_threads(arguments.common.threads);
  check_filter_extension(arguments.output);
  check_outputs({arguments.output, arguments.common.json}, {arguments.input});
  FilterBank filters = load_filters(arguments.input);
  if (arguments.model_id) filters = renamed(filters, *arguments.model_id);
  save_filters(filters, arguments.output, sign_of(arguments.sign));
  Json json;
  json["command"] = "convert";
  json["input"] = arguments.input;
  json["output"] = arguments.output;
  json["layers"] = filters.layers();
  json["model_id"] = filters.metadata().model_id;
  json["fingerprint"] = filters.fingerprint();
  write_json(arguments.common.json, json);
  fmt::print(
      "wrote {} ({}), {} layers\n",
      arguments.output,
      filters.fingerprint(),
      filters.layers());
}

}  // namespace

void add_convert_command(CLI::App& app, Action& action) {
  CLI::App* const command = app.add_subcommand(
      "convert", "Write a filter file in another format or sign");
  const auto arguments = std::make_shared<ConvertArguments>();
  command
      ->add_option(
          "in", arguments->input, "Filters, .npz, .safetensors or .gguf")
      ->type_name("IN")
      ->required();
  command
      ->add_option(
          "out",
          arguments->output,
          "File to write; its extension chooses the format")
      ->type_name("OUT")
      ->required();
  command
      ->add_option(
          "--sign",
          arguments->sign,
          "positive or negated, as stored; .npz is always positive "
          "[negated for .safetensors, else positive]")
      ->check(CLI::IsMember({"positive", "negated"}))
      ->type_name("SIGN");
  command
      ->add_option(
          "--model-id",
          arguments->model_id,
          "Record this name of the model instead of the file's own")
      ->type_name("TEXT");
  add_common_options(*command, arguments->common);
  command->callback(
      [&action, arguments] { action = [arguments] { convert(*arguments); }; });
}

}  // namespace qfilters::cli
