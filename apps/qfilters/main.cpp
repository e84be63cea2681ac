#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "qfilters/error.h"
#include "qfilters/isa.h"
#include "qfilters/version.h"

#include "commands.h"
#include "llama/model.h"
#include "output.h"

namespace {

constexpr int kRunFailed = 1;
constexpr int kBadInput = 2;

int exit_code(qfilters::ErrorKind kind) {
  switch (kind) {
    case qfilters::ErrorKind::kRuntime:
    case qfilters::ErrorKind::kMemoryLimit:
    case qfilters::ErrorKind::kLowRetention:
      return kRunFailed;
    default:
      return kBadInput;
  }
}

int fail(int code, const std::string& message) {
  const std::string line = qfilters::cli::one_line(message);
  std::fprintf(stderr, "qfilters: %s\n", line.c_str());
  return code;
}

// CLI11 misses a subcommand before it minds the word in its place.
std::string reason(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> rest = app.remaining(true);
  const bool required =
      error.get_exit_code() == static_cast<int>(CLI::ExitCodes::RequiredError);
  std::string text = error.what();
  if (!required || rest.empty() || text.find("subcommand") == text.npos) {
    return text;
  }
  return "unknown command or option '" + rest.front() + "'";
}

void choose_isa() {
  const char* const name = std::getenv("QFILTERS_ISA");
  if (name != nullptr) qfilters::set_isa(name);
}

int run(int argc, char** argv) {
  CLI::App app(
      "Calibrate, run and evaluate a language model in a fixed KV "
      "cache budget.");
  app.name("qfilters");
  app.set_version_flag(
      "--version", std::string("qfilters ") + qfilters::kVersion);
  app.require_subcommand(1);
  qfilters::cli::Action action;
  qfilters::cli::add_calibrate_command(app, action);
  qfilters::cli::add_convert_command(app, action);
  qfilters::cli::add_inspect_command(app, action);
  qfilters::cli::add_generate_command(app, action);
  qfilters::cli::add_eval_command(app, action);
  qfilters::cli::add_bench_command(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {
    const int code = app.exit(asked);  // --help and --version
    qfilters::cli::flush_stdout();
    return code;
  } catch (const CLI::ParseError& error) {
    return fail(kBadInput, reason(app, error) + " (see --help)");
  }
  choose_isa();
  action();
  qfilters::cli::flush_stdout();
  return 0;
}

// llama.cpp stops the process where it finds a model impossible; say so in
// one line, and skip what would run at exit.
void on_llama_abort(std::string_view reason, bool loading) {
  std::fflush(stdout);
  std::_Exit(fail(
      loading ? kBadInput : kRunFailed,
      (loading ? "llama.cpp cannot load the model: " : "llama.cpp gave up: ") +
          std::string(reason)));
}

}  // namespace

int main(int argc, char** argv) {
  qfilters::llama::set_abort_handler(on_llama_abort);
  try {
    return run(argc, argv);
  } catch (const qfilters::cli::ChildFailed& failed) {
    return failed.code();  // the child has said why
  } catch (const qfilters::Error& error) {
    return fail(exit_code(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(kRunFailed, "out of memory");
  } catch (const std::exception& error) {
    return fail(kRunFailed, error.what());
  }
}
