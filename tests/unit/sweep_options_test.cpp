#include "apps/qfilters/sweep_options.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsNull;
using ::testing::NotNull;

using test::error_of;
using test::IsError;

void add_lengths(CLI::App& command, TaskArguments& arguments) {
  command.add_option("--lengths", arguments.needle.lengths)->delimiter(',');
}

void add_more(CLI::App& command, TaskArguments& arguments) {
  add_lengths(command, arguments);
  command.add_option("--tasks", arguments.ruler.tasks)->delimiter(',');
  add_count(command, "--samples", arguments.ruler.samples, "Samples");
}

Task task_of(const char* name, void (*add)(CLI::App&, TaskArguments&)) {
  Task task{};
  task.name = name;
  task.add_options = add;
  task.reads_text = true;
  return task;
}

/// A sweep of two tasks that share --lengths.
class SweepOptionsTest : public ::testing::Test {
 protected:
  SweepOptionsTest() {
    sweep_->add_option("--tasks", tasks_)->delimiter(',');
    sweep_->add_option("--out", out_);
    add_text_options(*sweep_, shared_);
    add_shared_options(*sweep_, shared_);
    add_options_of_tasks(*sweep_, {&one_, &two_}, passed_on_);
  }

  /// The words after the names of the commands.
  Names command(const Task& task, const std::string& words) {
    app_.parse("eval sweep --model M " + words);
    Names command = command_of(*sweep_, task);
    EXPECT_EQ(command.at(0), "eval");
    EXPECT_EQ(command.at(1), task.name);
    return {command.begin() + 2, command.end()};
  }

  const Task one_ = task_of("one", add_lengths);
  const Task two_ = task_of("two", add_more);
  CLI::App app_;
  CLI::App* sweep_ = app_.add_subcommand("eval")->add_subcommand("sweep");
  TaskArguments shared_;
  Names tasks_;
  std::string out_;
  PassedOn passed_on_;
};

TEST_F(SweepOptionsTest, NamesOptionsOfOneTaskAsTheTaskDoes) {
  EXPECT_THAT(sweep_->get_option_no_throw("--samples"), NotNull());
  EXPECT_THAT(sweep_->get_option_no_throw("--two-samples"), IsNull());
  EXPECT_THAT(sweep_->get_option_no_throw("--one-tasks"), IsNull());
}

TEST_F(SweepOptionsTest, SharedOptionsReachEveryTask) {
  const std::string words = "--lengths 1,2 --chunk 8";
  EXPECT_THAT(
      command(one_, words),
      ElementsAre("--lengths=1,2", "--model=M", "--chunk=8"));
  EXPECT_THAT(
      command(two_, words),
      ElementsAre("--lengths=1,2", "--model=M", "--chunk=8"));
}

TEST_F(SweepOptionsTest, ATasksOwnNameComesFirst) {
  const std::string words = "--lengths 1 --two-lengths 3,4";
  EXPECT_THAT(command(one_, words), ElementsAre("--lengths=1", "--model=M"));
  EXPECT_THAT(command(two_, words), ElementsAre("--lengths=3,4", "--model=M"));
}

TEST_F(SweepOptionsTest, KeepsTheSweepsOwnOptionsToItself) {
  EXPECT_THAT(
      command(
          two_,
          "--tasks two --out D --policy auto --budget 9 --json J "
          "--two-tasks vt"),
      ElementsAre("--tasks=vt", "--model=M"));
}

TEST_F(SweepOptionsTest, ParsesAsTheTaskDoes) {
  Names words = command(two_, "--text T --lengths 3,4 --samples 7");
  words.insert(words.begin(), {"eval", "two"});
  TaskArguments arguments;
  parse(words, two_, arguments);
  EXPECT_THAT(arguments.needle.lengths, ElementsAre(3, 4));
  EXPECT_EQ(arguments.ruler.samples, 7U);
  EXPECT_EQ(arguments.text, "T");
  words.push_back("--samples=x");
  EXPECT_THAT(
      error_of([&] { parse(words, two_, arguments); }),
      IsError(ErrorKind::kInvalidArgument, "sweep: two: "));
}

}  // namespace
}  // namespace qfilters::cli
