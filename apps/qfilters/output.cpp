#include "output.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/core.h>
#include <unistd.h>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"

namespace qfilters::cli {

namespace {

constexpr std::size_t kBarWidth = 30;
constexpr std::chrono::milliseconds kRedraw{100};

}  // namespace

std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const bool blank = static_cast<unsigned char>(c) <= ' ' || c == '\x7f';
    if (!blank) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (!line.empty() && line.back() == ' ') {
    line.pop_back();
  }
  return line;
}

void warn(std::string_view message) {
  fmt::print(stderr, "qfilters: warning: {}\n", one_line(message));
}

std::string mebibytes(std::uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

void check_outputs(
    const std::vector<std::string>& outputs,
    const std::vector<std::string>& inputs) {
  std::vector<std::filesystem::path> taken;
  const auto file = [](const std::string& path) {
    std::error_code error;
    auto found = std::filesystem::weakly_canonical(path, error);
    return error ? std::filesystem::path(path) : found;
  };
  for (const std::string& input : inputs) {
    if (!input.empty()) taken.push_back(file(input));
  }
  for (const std::string& output : outputs) {
    if (output.empty()) continue;
    check_writable(output);
    const std::filesystem::path target = file(output);
    if (std::ranges::find(taken, target) != taken.end()) {
      throw Error(
          ErrorKind::kInvalidArgument,
          "output " + output + " would overwrite another file of this run");
    }
    taken.push_back(target);
  }
}

void flush_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw Error(ErrorKind::kRuntime, "cannot write to standard output");
  }
}

void Stdout::put(const std::string& text) {
  text_ += text;
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_stdout();
}

void write_json(const std::string& path, const Json& json) {
  if (path.empty()) return;
  write_file_atomically(
      path, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()) {}

ProgressBar::~ProgressBar() {
  clear();
}

void ProgressBar::update(std::size_t done, std::size_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || total == 0 || (drawn_ && now - drawn_at_ < kRedraw)) return;
  drawn_ = true;
  drawn_at_ = now;
  const std::size_t filled = kBarWidth * std::min(done, total) / total;
  const std::chrono::duration<double> seconds = now - start_;
  fmt::print(
      stderr,
      "\r\x1b[K{} [{:.<{}}] {}/{} {:.0f} s",
      label_,
      std::string(filled, '#'),
      kBarWidth,
      done,
      total,
      seconds.count());
  std::fflush(stderr);
}

void ProgressBar::clear() noexcept {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace qfilters::cli
