#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "qfilters/filter_file.h"

#include "commands.h"
#include "llama/filter_kind.h"
#include "output.h"
#include "run_options.h"

namespace qfilters::cli {

namespace {

constexpr double kNormTolerance = 1e-3;  // float32 files of other tools

struct InspectArguments {
  CommonOptions common;
  std::string path;
};

struct LayerFacts {
  std::size_t heads = 0;
  std::size_t dim = 0;
  double mean_norm = 0;
  double min_norm = std::numeric_limits<double>::infinity();
  double max_norm = 0;
  /// Mean cosine of all pairs of heads; 0 with a single head. Near 1, the
  /// heads of the layer look for the same direction.
  double mean_cosine = 0;
};

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

LayerFacts facts_of(const LayerFilters& layer) {
  LayerFacts facts;
  facts.heads = layer.heads;
  facts.dim = layer.dim;
  std::vector<double> norms;
  for (std::size_t h = 0; h < layer.heads; ++h) {
    norms.push_back(std::sqrt(dot(layer.head(h), layer.head(h))));
    facts.mean_norm += norms.back() / static_cast<double>(layer.heads);
    facts.min_norm = std::min(facts.min_norm, norms.back());
    facts.max_norm = std::max(facts.max_norm, norms.back());
  }
  double cosines = 0;
  std::size_t pairs = 0;
  for (std::size_t a = 0; a < layer.heads; ++a) {
    for (std::size_t b = a + 1; b < layer.heads; ++b, ++pairs) {
      const double norm = norms[a] * norms[b];
      cosines += norm > 0 ? dot(layer.head(a), layer.head(b)) / norm : 0.0;
    }
  }
  if (pairs > 0) facts.mean_cosine = cosines / static_cast<double>(pairs);
  return facts;
}

std::vector<std::string> warnings_of(
    const FilterMetadata& metadata, const std::vector<LayerFacts>& layers) {
  std::vector<std::string> warnings;
  const bool directions =
      llama::kind_of(metadata) == llama::FilterKind::kQFilters;
  for (std::size_t l = 0; l < layers.size() && directions; ++l) {
    const LayerFacts& facts = layers[l];
    if (std::abs(facts.min_norm - 1) > kNormTolerance ||
        std::abs(facts.max_norm - 1) > kNormTolerance) {
      warnings.push_back(fmt::format(
          "layer {}: norms from {:.4f} to {:.4f}, not 1",
          l,
          facts.min_norm,
          facts.max_norm));
    }
  }
  if (metadata.model_fingerprint.empty()) {
    warnings.emplace_back(
        "model unknown: only the shapes can be checked against a model");
  }
  if (metadata.query_site.empty()) {
    warnings.emplace_back(
        "query site unknown: filters of queries before RoPE score badly");
  } else if (directions && metadata.query_site != "attention") {
    warnings.push_back(
        "queries were taken at '" + metadata.query_site +
        "', not where attention multiplies them with keys");
  }
  return warnings;
}

void print(
    const std::string& path,
    const FilterBank& filters,
    const std::vector<LayerFacts>& layers,
    const std::vector<std::string>& warnings) {
  const FilterMetadata& metadata = filters.metadata();
  const auto known = [](const std::string& text) {
    return text.empty() ? std::string("unknown") : one_line(text);
  };
  fmt::print("file         {}\n", path);
  fmt::print("filters      {}\n", filters.fingerprint());
  fmt::print(
      "model        {} ({})\n",
      known(metadata.model_id),
      known(metadata.model_fingerprint));
  const llama::FilterKind kind = llama::kind_of(metadata);
  fmt::print("policy       {}\n", to_string(kind));
  fmt::print("query site   {}\n", known(metadata.query_site));
  fmt::print(
      "text         {} ({})\n",
      known(metadata.dataset),
      known(metadata.text_hash));
  fmt::print(
      "samples      {} per {} head\n",
      metadata.n_samples == 0 ? "unknown" : std::to_string(metadata.n_samples),
      kind == llama::FilterKind::kAuto || kind == llama::FilterKind::kSqueeze
          ? "KV"
          : "query");
  fmt::print("layers       {}\n\n", filters.layers());
  fmt::print("layer  heads     dim");
  if (kind == llama::FilterKind::kSqueeze) {
    fmt::print("  similarity");
  } else if (kind != llama::FilterKind::kExpected) {
    fmt::print("  mean norm  mean cosine of heads");
  }
  fmt::print("\n");
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerFacts& facts = layers[l];
    fmt::print("{:5}  {:5}  {:6}", l, facts.heads, facts.dim);
    // Statistics are no vectors: what is in them has no common length.
    if (kind == llama::FilterKind::kSqueeze) {
      fmt::print("  {:10.6f}", filters.layer(l).values.front());
    } else if (kind != llama::FilterKind::kExpected) {
      fmt::print("  {:9.4f}  {:20.4f}", facts.mean_norm, facts.mean_cosine);
    }
    fmt::print("\n");
  }
  if (!warnings.empty()) fmt::print("\n");
  for (const std::string& warning : warnings) {
    fmt::print("warning: {}\n", warning);
  }
}

Json to_json(
    const std::string& path,
    const FilterBank& filters,
    const std::vector<LayerFacts>& layers,
    const std::vector<std::string>& warnings) {
  const FilterMetadata& metadata = filters.metadata();
  Json json;
  json["command"] = "inspect";
  json["file"] = path;
  json["fingerprint"] = filters.fingerprint();
  json["policy"] = to_string(llama::kind_of(metadata));
  json["metadata"] = {
      {"model_id", metadata.model_id},
      {"model_fingerprint", metadata.model_fingerprint},
      {"query_site", metadata.query_site},
      {"dataset", metadata.dataset},
      {"text_hash", metadata.text_hash},
      {"n_samples", metadata.n_samples}};
  json["layers"] = Json::array();
  for (const LayerFacts& facts : layers) {
    json["layers"].push_back(
        {{"heads", facts.heads},
         {"dim", facts.dim},
         {"mean_norm", facts.mean_norm},
         {"min_norm", facts.min_norm},
         {"max_norm", facts.max_norm},
         {"mean_cosine", facts.mean_cosine}});
  }
  json["warnings"] = warnings;
  return json;
}

void inspect(const InspectArguments& arguments) {
  check_threads(arguments.common.threads);
  check_outputs({arguments.common.json}, {arguments.path});
  const FilterBank filters = load_filters(arguments.path);
  std::vector<LayerFacts> layers;
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    layers.push_back(facts_of(filters.layer(l)));
  }
  const std::vector<std::string> warnings =
      warnings_of(filters.metadata(), layers);
  write_json(
      arguments.common.json,
      to_json(arguments.path, filters, layers, warnings));
  print(arguments.path, filters, layers, warnings);
}

}  // namespace

void add_inspect_command(CLI::App& app, Action& action) {
  CLI::App* const command =
      app.add_subcommand("inspect", "Show what is in a filter file");
  const auto arguments = std::make_shared<InspectArguments>();
  command
      ->add_option(
          "file", arguments->path, "Filters, .npz, .safetensors or .gguf")
      ->type_name("FILE")
      ->required();
  add_common_options(*command, arguments->common);
  command->callback(
      [&action, arguments] { action = [arguments] { inspect(*arguments); }; });
}

}  // namespace qfilters::cli
