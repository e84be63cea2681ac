#include "child_runs.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

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
          "eval: cannot make " + name + ": " + std::strerror(errno));
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
  arguments.push_back("--policy=" + candidate.policy);
  arguments.push_back("--budget=" + candidate.budget);
  arguments.push_back("--json=" + json);
  arguments.emplace_back(kChildFlag);
  return arguments;
}

pid_t spawn(std::vector<std::string>& arguments) {
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) {
    pointers.push_back(argument.data());
  }
  pointers.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawn(
      &child, "/proc/self/exe", nullptr, nullptr, pointers.data(), environ);
  if (error != 0) {
    throw Error(
        ErrorKind::kRuntime,
        std::string("eval: cannot start a run: ") + std::strerror(error));
  }
  return child;
}

/// Waits for a child and passes a signal on to it. Polls: waiting without an
/// end could miss a signal that comes just before.
int wait_for(pid_t child) {
  bool passed_on = false;
  int status = 0;
  while (true) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    if (ended < 0 && errno != EINTR) {
      throw Error(ErrorKind::kRuntime, "eval: lost a run");
    }
    if (InterruptGuard::signal() != 0 && !passed_on) {
      kill(child, InterruptGuard::signal());
      passed_on = true;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

void check_status(int status, const Candidate& candidate) {
  if (InterruptGuard::signal() != 0) {
    throw Error(ErrorKind::kRuntime, "eval: interrupted");
  }
  if (WIFSIGNALED(status)) {
    throw Error(
        ErrorKind::kRuntime,
        fmt::format(
            "eval: the run of {} {} was killed by signal {} ({})",
            candidate.policy,
            candidate.budget,
            WTERMSIG(status),
            strsignal(WTERMSIG(status))));
  }
  if (WEXITSTATUS(status) != 0) throw ChildFailed(WEXITSTATUS(status));
}

}  // namespace

std::vector<Json> run_each_alone(
    const CLI::App& command, const std::vector<Candidate>& candidates) {
  const InterruptGuard guard(InterruptGuard::Mode::kAlways);
  const TemporaryFolder folder;
  std::vector<Json> runs;
  for (const Candidate& candidate : candidates) {
    const std::filesystem::path path =
        folder.path() / (std::to_string(runs.size()) + ".json");
    std::vector<std::string> arguments =
        arguments_for(command, candidate, path.string());
    check_status(wait_for(spawn(arguments)), candidate);
    std::ifstream file(path);
    runs.push_back(Json::parse(file).at("runs").at(0));
  }
  return runs;
}

}  // namespace qfilters::cli
