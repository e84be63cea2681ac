#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "utf8_stream.h"

namespace qfilters::cli {

using Json = nlohmann::ordered_json;

/// A run in another process failed and has reported the reason itself.
class ChildFailed : public std::exception {
 public:
  explicit ChildFailed(int code) noexcept : code_(code) {}

  [[nodiscard]] const char* what() const noexcept override {
    return "a run failed";
  }

  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

/// `text` with every run of white space and control characters as one space.
[[nodiscard]] std::string one_line(std::string_view text);

/// One line on stderr.
void warn(std::string_view message);

/// "12.3 MiB".
[[nodiscard]] std::string mebibytes(std::uint64_t bytes);

/// Throws Error kFile unless every non-empty path in `outputs` can be written,
/// kInvalidArgument when one is the same file as another output or an input.
void check_outputs(
    const std::vector<std::string>& outputs,
    const std::vector<std::string>& inputs);

/// Throws Error kRuntime when what was printed did not arrive.
void flush_stdout();

/// Writes pieces of text to stdout at once, whole characters only.
class Stdout {
 public:
  void write(std::string_view piece) { put(utf8_.push(piece)); }

  void finish() { put(utf8_.finish()); }

  /// A line break, whatever is held back.
  void end_line() { put("\n"); }

  /// What was written so far.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

  /// The start of a character that is not written yet.
  [[nodiscard]] const std::string& held() const noexcept {
    return utf8_.held();
  }

 private:
  void put(const std::string& text);

  Utf8Stream utf8_;
  std::string text_;
};

/// Writes a JSON object atomically; an empty path means that none is wanted.
/// Bytes that are not UTF-8 become U+FFFD.
void write_json(const std::string& path, const Json& json);

/// A bar on stderr while it lives, when stderr is a terminal; else nothing.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();

  void update(std::size_t done, std::size_t total);
  /// Takes the bar off the screen.
  void clear() noexcept;

 private:
  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point drawn_at_;
};

}  // namespace qfilters::cli
