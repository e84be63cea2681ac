#include "child_runs.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <fmt/core.h>
#include <spawn.h>
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

/// The given options of `command` again, but for what each candidate sets.
std::vector<std::string> arguments_for(
    const CLI::App& command,
    const Candidate& candidate,
    const std::string& json) {
  std::vector<std::string> arguments{
      "qfilters", command.get_parent()->get_name(), command.get_name()};
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty()) continue;
    const std::string name = "--" + option->get_lnames().front();
    if (name == "--policy" || name == "--budget" || name == "--json") continue;
    for (const std::string& value : option->results()) {
      arguments.push_back(fmt::format("{}={}", name, value));
    }
  }
  for (const auto& [name, value] : candidate) {
    arguments.push_back(fmt::format("{}={}", name, value));
  }
  arguments.push_back("--json=" + json);
  arguments.emplace_back(kChildFlag);
  return arguments;
}

std::string describe(const Candidate& candidate) {
  std::string text;
  for (const auto& [name, value] : candidate)
    text += (text.empty() ? "" : " ") + value;
  return text;
}

/// One candidate's process; killed and reaped with the object.
class Child {
 public:
  Child(
      const CLI::App& command,
      Candidate candidate,
      std::string json,
      bool piped)
      : command_(command.get_parent()->get_name()),
        candidate_(std::move(candidate)),
        json_(std::move(json)) {
    std::vector<std::string> arguments =
        arguments_for(command, candidate_, json_);
    std::vector<char*> pointers;
    for (std::string& argument : arguments)
      pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (piped) {
      make_pipe(turn_read_, turn_write_);
      make_pipe(step_read_, step_write_);
      posix_spawn_file_actions_adddup2(&actions, turn_read_, STDIN_FILENO);
      posix_spawn_file_actions_adddup2(&actions, step_write_, STDOUT_FILENO);
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
  std::optional<std::string> step() {
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

  /// Waits for the end and passes a signal on. Polls: waiting without an end
  /// could miss a signal that comes just before.
  Json result() {
    bool passed_on = false;
    int status = 0;
    while (true) {
      const pid_t ended = waitpid(pid_, &status, WNOHANG);
      if (ended == pid_) break;
      if (ended < 0 && errno != EINTR) {
        throw Error(
            ErrorKind::kRuntime, "lost the run of " + describe(candidate_));
      }
      if (InterruptGuard::signal() != 0 && !passed_on) {
        kill(pid_, InterruptGuard::signal());
        passed_on = true;
      }
      std::this_thread::sleep_for(kPoll);
    }
    pid_ = 0;
    check_status(status);
    std::ifstream file(json_);
    return Json::parse(file).at("runs").at(0);
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

  void check_status(int status) const {
    check_interrupt();
    if (WIFSIGNALED(status)) {
      throw Error(
          ErrorKind::kRuntime,
          fmt::format(
              "the run of {} was killed by signal {} ({})",
              describe(candidate_),
              WTERMSIG(status),
              strsignal(WTERMSIG(status))));
    }
    if (WEXITSTATUS(status) != 0) throw ChildFailed(WEXITSTATUS(status));
  }

  std::string command_;
  Candidate candidate_;
  std::string json_;
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
  std::vector<Json> results(children.size());
  for (std::size_t running = children.size(); running > 0;) {
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (!results[i].is_null()) continue;
      const std::optional<std::string> report = children[i]->step();
      std::size_t done = 0;
      std::size_t total = 0;
      if (!report) {
        results[i] = children[i]->result();
        --running;
      } else if (std::sscanf(report->c_str(), "%zu %zu", &done, &total) == 2) {
        bar.update(done, total);
      }
      children[i]->check_interrupt();
    }
  }
  return results;
}

}  // namespace

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
    const std::string json =
        folder.path() / (std::to_string(children.size()) + ".json");
    children.push_back(
        std::make_unique<Child>(command, candidate, json, in_turns));
    if (!in_turns) results.push_back(children.back()->result());
  }
  return in_turns ? take_turns(children) : results;
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
  fmt::print("{} {}\n", done, total);
  flush_stdout();
  wait_for_turn();
}

}  // namespace qfilters::cli
