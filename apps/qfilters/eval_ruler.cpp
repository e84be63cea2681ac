#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "qfilters/error.h"

#include "eval/layouts.h"
#include "eval/tasks/haystack.h"
#include "eval/tasks/ruler.h"
#include "eval_tasks.h"
#include "task_command.h"

namespace qfilters::cli {

namespace {

void add_options(CLI::App& command, TaskArguments& arguments) {
  const auto list = [&](const char* name, auto& values, const char* help) {
    return command.add_option(name, values, help)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->type_name("LIST");
  };
  std::string names;
  for (const eval::RulerTask& task : eval::ruler_tasks()) {
    names += (names.empty() ? "" : ", ") + std::string(task.name);
  }
  list(
      "--tasks", arguments.ruler.tasks, ("Which: " + names + " [all]").c_str());
  list(
      "--lengths",
      arguments.ruler.lengths,
      "Tokens of context, question and answer together, each")
      ->check(whole_number())
      ->capture_default_str();
  add_count(
      command,
      "--samples",
      arguments.ruler.samples,
      "Samples of each task at each length; --seed makes them");
  for (const auto& [name, folder, layout] :
       {std::tuple("--kvpress", &arguments.kvpress, "kvpress'"),
        std::tuple("--ruler-out", &arguments.ruler_out, "RULER's")}) {
    command
        .add_option(
            name,
            *folder,
            std::string("Write results in ") + layout + " layout below DIR")
        ->type_name("DIR");
  }
}

void check(const TaskArguments& arguments) {
  eval::check_ruler_options(arguments.ruler);
  (void)make_specs(arguments.run);
  for (const std::string& folder : {arguments.kvpress, arguments.ruler_out}) {
    if (!folder.empty()) eval::check_directory(folder);
  }
}

std::size_t longest(
    const TaskArguments& arguments, const eval::Codec& /*codec*/) {
  const std::vector<std::size_t>& lengths = arguments.ruler.lengths;
  return *std::max_element(lengths.begin(), lengths.end());
}

eval::RulerOptions ruler_options(const TaskArguments& arguments) {
  eval::RulerOptions options = arguments.ruler;
  options.seed = arguments.run.seed;
  return options;
}

std::string text_of(const TaskInputs& inputs) {
  std::string text;
  for (const eval::Token token : inputs.text) {
    text += inputs.codec.piece(token);
  }
  return text;
}

eval::LayoutInfo layout_info(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::RunSpec& spec,
    const eval::Haystack& haystack) {
  eval::LayoutInfo info;
  info.spec = spec;
  info.model = inputs.model->name();
  info.seed = arguments.run.seed;
  info.limits = [&inputs, spec](std::size_t length) {
    return eval::limits_of(spec, length, inputs.model->layer_shapes());
  };
  info.sample = [&](const eval::RulerCell& cell) {
    return eval::ruler_sample_of(
        inputs.codec, haystack, ruler_options(arguments), cell);
  };
  return info;
}

/// Every task must have room, every run folders of its own.
void check_runs(const TaskArguments& arguments, const TaskInputs& inputs) {
  const eval::Haystack haystack(text_of(inputs));
  eval::check_ruler_rooms(inputs.codec, haystack, ruler_options(arguments));
  std::set<std::string> folders;
  const auto take = [&](const std::string& name) {
    if (folders.insert(name).second) return;
    throw Error(
        ErrorKind::kInvalidArgument,
        "ruler: two runs would write the folder " + name);
  };
  for (const eval::Contender& contender : inputs.contenders) {
    const eval::LayoutInfo info =
        layout_info(arguments, inputs, contender.spec, haystack);
    for (const std::size_t length : arguments.ruler.lengths) {
      if (!arguments.kvpress.empty()) {
        take(eval::kvpress_folder(info, length));
      }
      if (!arguments.ruler_out.empty()) take(eval::ruler_folder(info, length));
    }
  }
}

Json to_json(const eval::RulerCell& cell) {
  return {
      {"task", cell.task},
      {"length", cell.length},
      {"sample", cell.sample},
      {"score", cell.score},
      {"nll_per_token", cell.nll_per_token},
      {"prediction", cell.prediction},
      {"references", cell.references},
      {"tokens", cell.tokens},
      {"compression_ratio", 1 - cell.kept}};
}

void add_results(Json& json, const std::vector<eval::RulerCell>& cells) {
  json["cells"] = Json::array();
  for (const eval::RulerCell& cell : cells) {
    json["cells"].push_back(to_json(cell));
  }
  json["means"] = Json::array();
  for (const eval::RulerMean& mean : eval::ruler_means(cells)) {
    json["means"].push_back(
        {{"task", mean.task},
         {"length", mean.length},
         {"score", mean.score},
         {"nll_per_token", mean.nll_per_token}});
  }
  // Every task counts the same, as in RULER.
  const std::vector<eval::RulerMean> tasks = eval::ruler_means(cells, true);
  double score = 0;
  double nll = 0;
  for (const eval::RulerMean& mean : tasks) {
    json["tasks"][mean.task] = {
        {"score", mean.score}, {"nll_per_token", mean.nll_per_token}};
    score += mean.score / static_cast<double>(tasks.size());
    nll += mean.nll_per_token / static_cast<double>(tasks.size());
  }
  json["score"] = score;
  json["mean_nll"] = nll;
}

std::vector<Json> run(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const eval::Haystack haystack(text_of(inputs));
  const std::unique_ptr<eval::Readers> readers = make_readers(inputs);
  const std::vector<eval::RulerResult> results = eval::run_ruler(
      *readers, inputs.codec, haystack, ruler_options(arguments), progress);
  const std::size_t tokens = longest(arguments, inputs.codec);
  std::vector<Json> runs;
  for (const eval::RulerResult& result : results) {
    const eval::LayoutInfo info = layout_info(
        arguments, inputs, inputs.contenders[runs.size()].spec, haystack);
    Json json = make_run(inputs, *readers, runs.size(), tokens);
    json["seed"] = arguments.run.seed;
    add_results(json, result.cells);
    if (!arguments.kvpress.empty()) {
      eval::write_kvpress(arguments.kvpress, info, result.cells);
    }
    if (!arguments.ruler_out.empty()) {
      eval::write_ruler(arguments.ruler_out, info, result.cells);
    }
    runs.push_back(std::move(json));
  }
  return runs;
}

}  // namespace

const Task kRuler{
    "ruler",
    "Which of RULER's tasks still work from a bounded cache",
    /*in_turns=*/false,
    add_options,
    check,
    longest,
    longest,
    run,
    /*reads_text=*/true,
    /*load=*/nullptr,
    check_runs,
    /*together=*/false,
    /*one_shot=*/true};

}  // namespace qfilters::cli
