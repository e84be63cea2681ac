#include <string>
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

Json run(
    const TaskArguments& arguments,
    const TaskInputs& inputs,
    const eval::Progress& progress) {
  const eval::QuestionsResult result = eval::run_questions(
      [&](std::size_t tokens) {
        return eval::open_session(
            inputs.spec, inputs.model, inputs.filters, tokens);
      },
      inputs.codec,
      arguments.question_set,
      arguments.questions,
      progress);
  eval::RunRecord record = eval::start_record(
      inputs.spec,
      eval::limits_of(
          inputs.spec,
          longest(arguments, inputs.codec),
          inputs.model->layer_shapes()),
      *inputs.model);
  eval::set_usage(record, result.usage);
  Json json = eval::to_json(record);
  json["query"] = kQueryAgnostic;
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
  return json;
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
    load};

}  // namespace qfilters::cli
