#include "eval/layouts.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>

#include <nlohmann/json.hpp>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

namespace qfilters::eval {

namespace {

namespace fs = std::filesystem;

std::string dump(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

/// Whole UTF-8 characters; U+FFFD for what is none.
std::string whole_characters(const std::string& bytes) {
  return Json::parse(dump(Json(bytes))).get<std::string>();
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == text.npos) return text;
  std::string field = "\"";
  for (const char c : text) {
    if (c == '"') field += '"';
    field += c;
  }
  return field + "\"";
}

std::string csv_row(const std::vector<std::string>& fields) {
  std::string row;
  for (const std::string& field : fields) {
    row += (row.empty() ? "" : ",") + csv_field(field);
  }
  return row + "\n";
}

std::string decimal(double value, int digits) {
  char text[64] = {};
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

/// A list of texts as Python shows it, which is what pandas writes.
std::string python_list(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) {
    text += (text.empty() ? "'" : ", '") + value + "'";
  }
  return "[" + text + "]";
}

/// A name as part of a folder's: no separators, no double underscores.
std::string as_name(std::string_view text) {
  std::string name;
  for (const char c : text) {
    const bool kept = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                      (c >= '0' && c <= '9') || c == '.' || c == '-';
    name += kept ? c : '-';
  }
  return name.empty() || name.front() == '.' ? "model" + name : name;
}

/// The policy, and how rows are stored where that is not as usual.
std::string press_of(const LayoutInfo& info) {
  const RunSpec& spec = info.spec;
  const bool ours = spec.policy != "llama";
  const std::string& type = ours ? spec.cache_type : spec.llama_cache_type;
  return spec.policy + (type == "f16" ? "" : "-" + type);
}

double ratio_of(const LayoutInfo& info, std::size_t length) {
  const std::optional<Limits> limits = info.limits(length);
  if (!limits || limits->budget >= length) return 0;
  return 1 - static_cast<double>(limits->budget) / static_cast<double>(length);
}

std::vector<RulerCell> cells_of(
    std::span<const RulerCell> cells, std::size_t length) {
  std::vector<RulerCell> some;
  for (const RulerCell& cell : cells) {
    if (cell.length == length) some.push_back(cell);
  }
  return some;
}

std::vector<std::size_t> lengths_of(std::span<const RulerCell> cells) {
  std::vector<std::size_t> lengths;
  for (const RulerCell& cell : cells) {
    if (std::find(lengths.begin(), lengths.end(), cell.length) ==
        lengths.end()) {
      lengths.push_back(cell.length);
    }
  }
  return lengths;
}

fs::path make_folder(const fs::path& directory, const std::string& name) {
  fs::path folder = directory / name;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw Error(
        ErrorKind::kFile,
        "cannot make the folder " + folder.string() + ": " + error.message());
  }
  return folder;
}

std::string kvpress_config(const LayoutInfo& info, std::size_t length) {
  const std::optional<Limits> limits = info.limits(length);
  // A JSON text is a YAML text too.
  std::string yaml =
      "dataset: ruler\ndata_dir: " + dump(std::to_string(length)) +
      "\nmodel: " + dump(info.model) + "\npress_name: " + press_of(info) +
      "\ncompression_ratio: " + decimal(ratio_of(info, length), 4) +
      "\nfraction: 1.0\nmax_new_tokens: null\n"
      "max_context_length: null\nquery_aware: false\n"
      "seed: " +
      std::to_string(info.seed) + "\nprotocol: " + info.spec.protocol +
      "\nchunk: " + std::to_string(info.spec.chunk) + "\n";
  if (limits) {
    yaml += "budget: " + std::to_string(limits->budget) +
            "\nsink: " + std::to_string(limits->sinks) +
            "\nrecent: " + std::to_string(limits->recent) +
            "\ninterval: " + std::to_string(limits->interval) + "\n";
  }
  return yaml;
}

std::string kvpress_predictions(
    const LayoutInfo& info, std::span<const RulerCell> cells) {
  std::string csv = csv_row(
      {"task",
       "question",
       "answer_prefix",
       "answer",
       "max_new_tokens",
       "predicted_answer",
       "compression_ratio"});
  for (const RulerCell& cell : cells) {
    const RulerSample sample = info.sample(cell);
    csv += csv_row(
        {cell.task,
         sample.question,
         sample.answer_prefix,
         python_list(cell.references),
         std::to_string(find_ruler_task(cell.task).generate),
         whole_characters(cell.prediction),
         decimal(1 - cell.kept, 4)});
  }
  return csv;
}

double percent(double score) {
  return std::stod(decimal(100 * score, 2));
}

std::string kvpress_metrics(std::span<const RulerCell> cells) {
  Json metrics = Json::object();
  for (const RulerMean& mean : ruler_means(cells)) {
    metrics[mean.task] = {{"string_match", percent(mean.score)}};
  }
  return dump(metrics, 4) + "\n";
}

Json ruler_line(const RulerCell& cell, const RulerSample& sample) {
  Json line;
  line["index"] = cell.sample;
  line["pred"] = cell.prediction;
  line["input"] = sample.context + sample.question + sample.answer_prefix;
  line["outputs"] = cell.references;
  line["others"] = Json::object();
  line["truncation"] = -1;
  line["length"] = cell.tokens + find_ruler_task(cell.task).generate;
  return line;
}

bool is_null(const std::string& prediction) {
  return prediction.find_first_not_of(" \t\r\n") == prediction.npos;
}

/// Three rows below a row of column numbers, as pandas writes a frame.
std::string ruler_summary(std::span<const RulerCell> cells) {
  std::vector<std::string> numbers{"0"};
  std::vector<std::string> tasks{"Tasks"};
  std::vector<std::string> scores{"Score"};
  std::vector<std::string> nulls{"Nulls"};
  for (const RulerMean& mean : ruler_means(cells)) {
    const auto empty =
        std::count_if(cells.begin(), cells.end(), [&](const RulerCell& cell) {
          return cell.task == mean.task && is_null(cell.prediction);
        });
    numbers.push_back(std::to_string(numbers.size()));
    tasks.push_back(mean.task);
    scores.push_back(decimal(100 * mean.score, 2));
    nulls.push_back(std::to_string(empty) + "/" + std::to_string(mean.samples));
  }
  return csv_row(numbers) + csv_row(tasks) + csv_row(scores) + csv_row(nulls);
}

}  // namespace

std::string kvpress_folder(const LayoutInfo& info, std::size_t length) {
  return "ruler__" + std::to_string(length) + "__" + as_name(info.model) +
         "__" + press_of(info) + "__" + decimal(ratio_of(info, length), 2);
}

std::string ruler_folder(const LayoutInfo& info, std::size_t length) {
  const std::optional<Limits> limits = info.limits(length);
  return press_of(info) + (limits ? "-" + std::to_string(limits->budget) : "") +
         "/" + std::to_string(length);
}

void write_kvpress(
    const fs::path& directory,
    const LayoutInfo& info,
    std::span<const RulerCell> cells) {
  for (const std::size_t length : lengths_of(cells)) {
    const std::vector<RulerCell> some = cells_of(cells, length);
    const fs::path folder =
        make_folder(directory, kvpress_folder(info, length));
    write_file_atomically(
        folder / "predictions.csv", kvpress_predictions(info, some));
    write_file_atomically(folder / "metrics.json", kvpress_metrics(some));
    write_file_atomically(folder / "config.yaml", kvpress_config(info, length));
  }
}

void write_ruler(
    const fs::path& directory,
    const LayoutInfo& info,
    std::span<const RulerCell> cells) {
  for (const std::size_t length : lengths_of(cells)) {
    const std::vector<RulerCell> some = cells_of(cells, length);
    const fs::path folder = make_folder(directory, ruler_folder(info, length));
    for (const RulerMean& mean : ruler_means(some)) {
      std::string lines;
      for (const RulerCell& cell : some) {
        if (cell.task != mean.task) continue;
        lines += dump(ruler_line(cell, info.sample(cell))) + "\n";
      }
      write_file_atomically(folder / (mean.task + ".jsonl"), lines);
    }
    write_file_atomically(folder / "summary.csv", ruler_summary(some));
  }
}

void check_directory(const fs::path& directory) {
  std::error_code error;
  fs::path nearest = fs::absolute(directory, error).lexically_normal();
  while (!error && !fs::exists(nearest, error) && nearest.has_relative_path()) {
    nearest = nearest.parent_path();
  }
  if (error || !fs::is_directory(nearest, error)) {
    throw Error(
        ErrorKind::kFile,
        "cannot make files in " + directory.string() + ": " +
            (error ? error.message()
                   : nearest.string() + " is not a directory"));
  }
  check_writable(nearest / "qfilters-check");
}

}  // namespace qfilters::eval
