#include "child_runs.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "qfilters/error.h"

#include "interrupt.h"

namespace qfilters::cli {

namespace {

constexpr std::chrono::milliseconds kPoll{20};

/// A fresh folder that is gone at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name =
        (std::filesystem::temp_directory_path() / "qfilters-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      throw Error(
          ErrorKind::kFile,
          "cannot make " + name + ": " + std::strerror(errno));
    }
    path_ = name;
  }

  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// A step as report_step() writes it.
void pass_on(const std::string& report, const eval::Progress& progress) {
  std::size_t done = 0;
  std::size_t total = 0;
  if (std::sscanf(report.c_str(), "%zu %zu", &done, &total) == 2) {
    progress(done, total);
  }
}

std::string describe(const Candidate& candidate) {
  std::string text;
  for (const auto& [name, value] : candidate) {
    text += (text.empty() ? "" : " ") + value;
  }
  return text;
}

std::vector<std::string> with_candidate(
    std::vector<std::string> arguments, const Candidate& candidate) {
  for (const auto& [name, value] : candidate) {
    arguments.push_back(fmt::format("{}={}", name, value));
  }
  return arguments;
}

std::string killed_by(int status) {
  return fmt::format(
      "killed by signal {} ({})",
      WTERMSIG(status),
      strsignal(WTERMSIG(status)));
}

struct ChildOptions {
  std::string json;       ///< where its result goes
  std::string errors;     ///< where its stderr goes; empty: to ours
  bool in_turns = false;  ///< waits for its turn before each step
};

/// A process of the program; killed and reaped with the object.
class Child {
 public:
  /// `label` says in messages whose run it is.
  Child(
      std::vector<std::string> arguments,
      std::string label,
      ChildOptions options)
      : command_(arguments.front()),
        label_(std::move(label)),
        options_(std::move(options)) {
    arguments.insert(arguments.begin(), "qfilters");
    arguments.push_back("--json=" + options_.json);
    arguments.emplace_back(kChildFlag);
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) {
      pointers.push_back(argument.data());
    }
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    make_pipe(step_read_, step_write_);
    posix_spawn_file_actions_adddup2(&actions, step_write_, STDOUT_FILENO);
    if (options_.in_turns) {
      make_pipe(turn_read_, turn_write_);
      posix_spawn_file_actions_adddup2(&actions, turn_read_, STDIN_FILENO);
    }
    if (!options_.errors.empty()) {
      posix_spawn_file_actions_addopen(
          &actions,
          STDERR_FILENO,
          options_.errors.c_str(),
          O_WRONLY | O_CREAT | O_TRUNC,
          S_IRUSR | S_IWUSR);
    }
    const int error = posix_spawn(
        &pid_, "/proc/self/exe", &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close_end(turn_read_);
    close_end(step_write_);
    if (error != 0) {
      pid_ = 0;
      throw Error(
          ErrorKind::kRuntime,
          std::string("cannot start a run: ") + std::strerror(error));
    }
  }

  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  ~Child() {
    close_end(turn_write_);
    close_end(step_read_);
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  /// Lets the child make a step; its report, or none when it has ended.
  [[nodiscard]] std::optional<std::string> step() const {
    // A child that is gone shows at the read.
    while (::write(turn_write_, "\n", 1) < 0 && errno == EINTR) {
    }
    std::string line;
    char c = 0;
    while (true) {
      const ssize_t got = ::read(step_read_, &c, 1);
      if (got < 0 && errno == EINTR) {
        check_interrupt();
        continue;
      }
      if (got <= 0) return std::nullopt;
      if (c == '\n') return line;
      line += c;
    }
  }

  /// Waits for the end, hears the steps and passes a signal on; the status.
  /// Polls: waiting without an end could miss a signal that comes just before.
  int wait(const eval::Progress& progress) {
    bool passed_on = false;
    int status = 0;
    while (true) {
      const pid_t ended = waitpid(pid_, &status, WNOHANG);
      if (ended == pid_) break;
      if (ended < 0 && errno != EINTR) {
        throw Error(ErrorKind::kRuntime, "lost the run of " + label_);
      }
      if (InterruptGuard::signal() != 0 && !passed_on) {
        kill(pid_, InterruptGuard::signal());
        passed_on = true;
      }
      hear_steps(progress);
    }
    pid_ = 0;
    check_interrupt();
    return status;
  }

  /// The JSON objects of its runs, once it has ended well. Throws otherwise.
  std::vector<Json> results(const eval::Progress& progress) {
    const int status = wait(progress);
    if (WIFSIGNALED(status)) {
      throw Error(
          ErrorKind::kRuntime,
          "the run of " + label_ + " was " + killed_by(status));
    }
    if (WEXITSTATUS(status) != 0) throw ChildFailed(WEXITSTATUS(status));
    return runs();
  }

  [[nodiscard]] std::vector<Json> runs() const {
    std::ifstream file(options_.json);
    return Json::parse(file).at("runs");
  }

  void check_interrupt() const {
    if (InterruptGuard::signal() == 0) return;
    throw Error(ErrorKind::kRuntime, command_ + ": interrupted");
  }

 private:
  static void make_pipe(int& read_end, int& write_end) {
    int ends[2] = {};
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw Error(
          ErrorKind::kRuntime,
          std::string("cannot make a pipe: ") + std::strerror(errno));
    }
    read_end = ends[0];
    write_end = ends[1];
  }

  static void close_end(int& end) {
    if (end >= 0) ::close(std::exchange(end, -1));
  }

  /// Waits for a moment, or until the child says something.
  void hear_steps(const eval::Progress& progress) {
    pollfd end{step_read_, POLLIN, 0};
    if (::poll(&end, step_read_ >= 0 ? 1 : 0, kPoll.count()) <= 0) return;
    std::array<char, 512> bytes{};
    const ssize_t got = ::read(step_read_, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) return;
    if (got <= 0) return close_end(step_read_);
    heard_.append(bytes.data(), static_cast<std::size_t>(got));
    const std::size_t end_of_lines = heard_.rfind('\n');
    if (end_of_lines == std::string::npos) return;
    const std::size_t before = heard_.rfind('\n', end_of_lines - 1);
    const std::size_t last = before == std::string::npos ? 0 : before + 1;
    pass_on(heard_.substr(last, end_of_lines - last), progress);
    heard_.erase(0, end_of_lines + 1);
  }

  std::string command_;
  std::string label_;
  ChildOptions options_;
  std::string heard_;  // an unfinished line
  pid_t pid_ = 0;
  int turn_read_ = -1;
  int turn_write_ = -1;
  int step_read_ = -1;
  int step_write_ = -1;
};

/// While it lives, writing to a process that has ended is an error only.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    struct sigaction ignore {};

    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &ignore, &old_);
  }

  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

  ~NoPipeSignal() { sigaction(SIGPIPE, &old_, nullptr); }

 private:
  struct sigaction old_ {};
};

/// Steps of all children in turn until each has ended; their results.
std::vector<Json> take_turns(
    const std::vector<std::unique_ptr<Child>>& children) {
  const NoPipeSignal guard;
  ProgressBar bar("all in turn");
  const eval::Progress progress = [&](std::size_t done, std::size_t total) {
    bar.update(done, total);
  };
  std::vector<Json> results(children.size());
  for (std::size_t running = children.size(); running > 0;) {
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (!results[i].is_null()) continue;
      const std::optional<std::string> report = children[i]->step();
      if (!report) {
        results[i] = children[i]->results(progress).at(0);
        --running;
      } else {
        pass_on(*report, progress);
      }
      children[i]->check_interrupt();
    }
  }
  return results;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::vector<std::string> child_arguments(const CLI::App& command) {
  std::vector<std::string> arguments{
      command.get_parent()->get_name(), command.get_name()};
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty()) continue;
    const std::string name = "--" + option->get_lnames().front();
    if (name == "--policy" || name == "--budget" || name == "--json") continue;
    for (const std::string& value : option->results()) {
      arguments.push_back(fmt::format("{}={}", name, value));
    }
  }
  return arguments;
}

std::vector<Json> run_children(
    const CLI::App& command,
    const std::vector<Candidate>& candidates,
    Order order) {
  const InterruptGuard guard(InterruptGuard::Mode::kAlways);
  const TemporaryFolder folder;
  const bool in_turns = order == Order::kInTurns;
  std::vector<Json> results;
  std::vector<std::unique_ptr<Child>> children;
  for (const Candidate& candidate : candidates) {
    ChildOptions options;
    options.json = folder.path() / (std::to_string(children.size()) + ".json");
    options.in_turns = in_turns;
    const std::string label = describe(candidate);
    children.push_back(std::make_unique<Child>(
        with_candidate(child_arguments(command), candidate), label, options));
    if (in_turns) continue;
    ProgressBar bar(label);
    results.push_back(children.back()
                          ->results([&](std::size_t done, std::size_t total) {
                            bar.update(done, total);
                          })
                          .at(0));
  }
  return in_turns ? take_turns(children) : results;
}

ChildOutcome run_child(
    const std::vector<std::string>& arguments, const eval::Progress& progress) {
  const InterruptGuard guard(InterruptGuard::Mode::kAlways);
  const TemporaryFolder folder;
  ChildOptions options;
  options.json = folder.path() / "run.json";
  options.errors = folder.path() / "errors.txt";
  Child child(arguments, "a child", options);
  const int status = child.wait(progress);
  ChildOutcome outcome;
  std::string errors = content_of(options.errors);
  if (WIFSIGNALED(status)) {
    outcome.failure = killed_by(status);
  } else if (WEXITSTATUS(status) != 0) {
    outcome.failure = one_line(errors);
    if (outcome.failure.empty()) {
      outcome.failure = fmt::format("exit code {}", WEXITSTATUS(status));
    }
  } else {
    outcome.runs = child.runs();
    outcome.warnings = std::move(errors);
  }
  return outcome;
}

void report_step(std::size_t done, std::size_t total) {
  fmt::print("{} {}\n", done, total);
  flush_stdout();
}

namespace {

void wait_for_turn() {
  char c = 0;
  ssize_t got = 0;
  do {
    got = ::read(STDIN_FILENO, &c, 1);
  } while (got < 0 && errno == EINTR);
  if (got != 1) throw Error(ErrorKind::kRuntime, "the parent run is gone");
}

}  // namespace

TurnTaker::TurnTaker() {
  wait_for_turn();
}

void TurnTaker::next(std::size_t done, std::size_t total) {
  report_step(done, total);
  wait_for_turn();
}

}  // namespace qfilters::cli
