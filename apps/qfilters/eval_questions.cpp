#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "eval/tasks/questions.h"
#include "eval_tasks.h"
#include "task_command.h"

namespace qfilters::cli {

namespace {

void add_options(CLI::App& command, TaskArguments& arguments) {
  command
      .add_option(
          "--file",
          arguments.question_file,
          "Questions, one JSON object a line: {\"context\" or "
          "\"context_file\", \"question\", \"answers\": [...]}")
      ->type_name("FILE")
      ->required();
  add_count(
      command,
      "--generate",
      arguments.questions.generate,
      "Most tokens of an answer");
}

void check(const TaskArguments& arguments) {
  eval::check_questions_options(arguments.questions);
  (void)make_specs(arguments.run);
}

void load(TaskArguments& arguments) {
  arguments.question_set = eval::read_questions(arguments.question_file);
}

std::size_t no_text(const TaskArguments&, const eval::Codec&) {
  return 0;
}

std::size_t longest(const TaskArguments& arguments, const eval::Codec& codec) {
  return eval::questions_tokens(
      codec, arguments.question_set, arguments.questions);
}

std::vector<Json> run(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const std::unique_ptr<eval::Readers> readers = make_readers(inputs);
  const std::vector<eval::QuestionsResult> results = eval::run_questions(
      *readers,
      inputs.codec,
      arguments.question_set,
      arguments.questions,
      progress);
  const std::size_t tokens = longest(arguments, inputs.codec);
  std::vector<Json> runs;
  for (const eval::QuestionsResult& result : results) {
    Json json = make_run(inputs, *readers, runs.size(), tokens);
    json["cells"] = Json::array();
    for (const eval::QuestionCell& cell : result.cells) {
      json["cells"].push_back(
          {{"line", cell.line},
           {"score", cell.score},
           {"fraction", cell.fraction},
           {"nll_per_token", cell.nll_per_token},
           {"prediction", cell.prediction},
           {"references", cell.references},
           {"compression_ratio", 1 - cell.kept}});
    }
    json["score"] = result.score;
    json["fraction"] = result.fraction;
    json["mean_nll"] = result.mean_nll;
    runs.push_back(std::move(json));
  }
  return runs;
}

}  // namespace

const Task kQuestions{
    "questions",
    "Whether your own questions are answered from a bounded cache",
    /*in_turns=*/false,
    add_options,
    check,
    no_text,
    longest,
    run,
    /*reads_text=*/false,
    load,
    /*check_runs=*/nullptr,
    /*together=*/false,
    /*one_shot=*/true};

}  // namespace qfilters::cli
