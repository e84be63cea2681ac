#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "eval/run.h"
#include "eval/tasks/reading.h"
#include "eval/text.h"

namespace qfilters::eval {

/// Questions of a user's own, each about one of the contexts.
struct QuestionSet {
  struct Entry {
    std::size_t line = 0;     ///< of the file, from 1
    std::size_t context = 0;  ///< index into `contexts`
    std::string question;
    std::string answer_prefix = "Answer:";  ///< what the answer goes on with
    std::vector<std::string> answers;       ///< one or more
  };

  std::vector<std::string> contexts;  ///< each once
  std::vector<Entry> entries;         ///< in the order of the file
};

/// Reads a file of one JSON object a line: {"context": TEXT or "context_file":
/// PATH, "question": TEXT, "answers": [TEXT, ...]} and, if wanted,
/// "answer_prefix": TEXT; other keys and blank lines are skipped, a relative
/// PATH starts at the file's folder. Throws Error
/// kInvalidArgument naming file and line for anything else, also for empty
/// texts and for more than 16 MiB in a line or 64 MiB in a context file; kFile
/// for a file that cannot be read.
[[nodiscard]] QuestionSet read_questions(const std::filesystem::path& path);

struct QuestionsOptions {
  std::size_t generate = 64;  ///< most tokens of an answer
};

struct QuestionCell {
  std::size_t line = 0;
  double score = 0;          ///< 1 if any of the answers was found, else 0
  double fraction = 0;       ///< share of the answers found
  double nll_per_token = 0;  ///< of the first answer
  std::string prediction;
  std::vector<std::string> references;
  double kept = 1;  ///< see Reply
};

struct QuestionsResult {
  std::vector<QuestionCell> cells;  ///< in the order of the file
  double score = 0;                 ///< means over the cells
  double fraction = 0;
  double mean_nll = 0;
};

/// Throws Error kInvalidArgument for no tokens or too many to generate.
void check_questions_options(const QuestionsOptions& options);

/// Tokens of the longest sequence.
[[nodiscard]] std::size_t questions_tokens(
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options);

/// Asks every question from a cache that has read its context without knowing
/// the question (see Reading). A context that several questions share is read
/// once, in a session for the longest of them. One result a reader.
[[nodiscard]] std::vector<QuestionsResult> run_questions(
    Readers& readers,
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options,
    const Progress& progress = {});

}  // namespace qfilters::eval
