#include "eval/tasks/questions.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "eval/tasks/scoring.h"

namespace qfilters::eval {

namespace {

constexpr std::size_t kMostLine = std::size_t{16} << 20U;
constexpr std::size_t kMostFile = std::size_t{64} << 20U;

/// Opens a regular file: several runs read it, one after the other.
std::ifstream open_file(
    const std::string& where, const std::filesystem::path& path) {
  const auto fail = [&](const std::string& reason) {
    throw Error(
        ErrorKind::kFile,
        where + "cannot read " + path.string() + ": " + reason);
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) fail("No such file or directory");
  if (!std::filesystem::is_regular_file(status)) fail("no regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) fail(std::strerror(errno));
  return file;
}

/// The next line, without its end; at most one byte more than kMostLine.
bool read_line(std::ifstream& file, std::string& line) {
  line.clear();
  char c = 0;
  while (file.get(c)) {
    if (c == '\n') return true;
    line += c;
    if (line.size() > kMostLine) return true;
  }
  return !line.empty();
}

class Reader {
 public:
  explicit Reader(std::filesystem::path path) : path_(std::move(path)) {}

  QuestionSet read() {
    std::ifstream file = open_file("questions: ", path_);
    std::string line;
    while (read_line(file, line)) {
      ++line_;
      if (line.size() > kMostLine) refuse("longer than 16 MiB");
      if (line.find_first_not_of(" \t\r") != line.npos) add(line);
    }
    if (file.bad()) {
      throw Error(ErrorKind::kFile, "questions: cannot read " + path_.string());
    }
    if (set_.entries.empty()) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "questions: " + path_.string() + " holds no question");
    }
    return std::move(set_);
  }

 private:
  [[nodiscard]] std::string where() const {
    return "questions: " + path_.string() + " line " + std::to_string(line_) +
           ": ";
  }

  [[noreturn]] void refuse(const std::string& reason) const {
    throw Error(ErrorKind::kInvalidArgument, where() + reason);
  }

  void add(const std::string& line) {
    // What lies deeper than a list of answers is not built: a line of nothing
    // but brackets would take a hundred times its size.
    const Json object = Json::parse(
        line,
        [](int depth, Json::parse_event_t, const Json&) { return depth <= 2; },
        /*allow_exceptions=*/false);
    if (object.is_discarded()) refuse("not JSON in UTF-8");
    if (!object.is_object()) refuse("not a JSON object");
    QuestionSet::Entry entry;
    entry.line = line_;
    entry.question = text_of(object, "question");
    const auto answers = object.find("answers");
    if (answers == object.end()) refuse("no \"answers\"");
    if (!answers->is_array() || answers->empty()) {
      refuse("\"answers\" is not a list of one or more texts");
    }
    for (const Json& answer : *answers) {
      entry.answers.push_back(full_text(answer, "answers"));
    }
    if (object.contains("answer_prefix")) {
      entry.answer_prefix = text_of(object, "answer_prefix");
    }
    entry.context = context_of(object);
    set_.entries.push_back(std::move(entry));
  }

  [[nodiscard]] std::string full_text(
      const Json& value, const char* key) const {
    const auto* const text = value.get_ptr<const std::string*>();
    if (text == nullptr) refuse("\"" + std::string(key) + "\" is not text");
    if (text->find_first_not_of(" \t\r\n") == text->npos) {
      refuse("\"" + std::string(key) + "\" holds an empty text");
    }
    return *text;
  }

  [[nodiscard]] std::string text_of(const Json& object, const char* key) const {
    const auto value = object.find(key);
    if (value == object.end()) refuse("no \"" + std::string(key) + "\"");
    return full_text(*value, key);
  }

  std::size_t context_of(const Json& object) {
    const bool inside = object.contains("context");
    if (inside == object.contains("context_file")) {
      refuse("give one of \"context\" and \"context_file\"");
    }
    if (inside) return keep(text_of(object, "context"));
    const std::filesystem::path path =
        path_.parent_path() / text_of(object, "context_file");
    const auto known = files_.find(path);
    if (known != files_.end()) return known->second;
    const std::size_t index = keep(read_context(path));
    files_.emplace(path, index);
    return index;
  }

  [[nodiscard]] std::string read_context(
      const std::filesystem::path& path) const {
    std::ifstream file = open_file(where(), path);
    std::error_code ignored;
    const auto size = std::filesystem::file_size(path, ignored);
    if (ignored || size > kMostFile) {
      refuse(path.string() + " is larger than 64 MiB");
    }
    std::string text(static_cast<std::size_t>(size), '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(file.gcount()));
    if (text.find_first_not_of(" \t\r\n") == text.npos) {
      refuse(path.string() + " holds an empty text");
    }
    return text;
  }

  std::size_t keep(std::string text) {
    const auto [place, added] =
        known_.emplace(std::move(text), set_.contexts.size());
    if (added) set_.contexts.push_back(place->first);
    return place->second;
  }

  std::filesystem::path path_;
  std::size_t line_ = 0;
  QuestionSet set_;
  std::map<std::string, std::size_t> known_;
  std::map<std::filesystem::path, std::size_t> files_;
};

Inquiry inquiry_of(
    const Codec& codec,
    const QuestionSet::Entry& entry,
    const QuestionsOptions& options) {
  Inquiry inquiry = make_inquiry(
      codec,
      "\n\nQuestion: " + entry.question + "\n" + entry.answer_prefix,
      " " + entry.answers.front());
  inquiry.references = entry.answers;
  inquiry.generate = options.generate;
  return inquiry;
}

/// A context's tokens and those who ask about it.
struct Group {
  std::vector<Token> context;
  std::vector<std::size_t> entries;
  std::vector<Inquiry> inquiries;
  std::size_t tokens = 0;  ///< of its longest sequence
};

Group make_group(
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options,
    std::size_t context) {
  Group group;
  group.context = codec.prefix;
  const std::vector<Token> text = codec.tokenize(set.contexts[context]);
  group.context.insert(group.context.end(), text.begin(), text.end());
  for (std::size_t i = 0; i < set.entries.size(); ++i) {
    if (set.entries[i].context != context) continue;
    group.entries.push_back(i);
    group.inquiries.push_back(inquiry_of(codec, set.entries[i], options));
    group.tokens = std::max(
        group.tokens, group.context.size() + tokens_of(group.inquiries.back()));
  }
  return group;
}

QuestionCell make_cell(const QuestionSet::Entry& entry, Reply reply) {
  QuestionCell cell;
  cell.line = entry.line;
  cell.fraction = share_found(reply.prediction, entry.answers);
  cell.score = cell.fraction > 0 ? 1 : 0;
  cell.nll_per_token = reply.nll_per_token;
  cell.prediction = std::move(reply.prediction);
  cell.references = entry.answers;
  cell.kept = reply.kept;
  return cell;
}

}  // namespace

QuestionSet read_questions(const std::filesystem::path& path) {
  return Reader(path).read();
}

void check_questions_options(const QuestionsOptions& options) {
  if (!is_size(options.generate)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "questions: " + std::to_string(options.generate) +
            " tokens to generate are not in 1.." + std::to_string(kMostSize));
  }
}

std::size_t questions_tokens(
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options) {
  std::size_t longest = 0;
  for (std::size_t i = 0; i < set.contexts.size(); ++i) {
    longest = std::max(longest, make_group(codec, set, options, i).tokens);
  }
  if (longest > kMostTokens) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "questions: a context of " + std::to_string(longest) +
            " tokens is too long");
  }
  return longest;
}

std::vector<QuestionsResult> run_questions(
    Readers& readers,
    const Codec& codec,
    const QuestionSet& set,
    const QuestionsOptions& options,
    const Progress& progress) {
  check_questions_options(options);
  std::vector<QuestionsResult> results(readers.count());
  for (QuestionsResult& result : results) {
    result.cells.resize(set.entries.size());
  }
  const std::size_t total = readers.count() * set.entries.size();
  std::size_t done = 0;
  for (std::size_t i = 0; i < set.contexts.size(); ++i) {
    const Group group = make_group(codec, set, options, i);
    const auto ask = [&](std::size_t reader, Reading& reading) {
      for (std::size_t j = 0; j < group.entries.size(); ++j) {
        const std::size_t at = group.entries[j];
        results[reader].cells[at] =
            make_cell(set.entries[at], reading.ask(group.inquiries[j]));
        ++done;
        if (progress) progress(done, total);
      }
    };
    readers.read(group.context, group.tokens, ask);
  }
  for (QuestionsResult& result : results) {
    const auto count = static_cast<double>(result.cells.size());
    for (const QuestionCell& cell : result.cells) {
      result.score += cell.score / count;
      result.fraction += cell.fraction / count;
      result.mean_nll += cell.nll_per_token / count;
    }
  }
  return results;
}

}  // namespace qfilters::eval
