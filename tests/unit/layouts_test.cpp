#include "eval/layouts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using ::testing::HasSubstr;

using test::error_of;
using test::IsError;

class LayoutsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("qfilters_layouts_" + std::to_string(getpid()));
    info_.spec.policy = "knorm";
    info_.model = "org/A__model 8B";
    info_.seed = 7;
    info_.limits = [](std::size_t) {
      return std::optional<Limits>({256, 4, 128, 64});
    };
    info_.sample = [](const RulerCell& cell) {
      RulerSample sample;
      sample.context = "Context " + std::to_string(cell.sample) + ".";
      sample.question = "\n\nQuestion, \"quoted\"?\n";
      sample.answer_prefix = "Answer:";
      return sample;
    };
    cells_.resize(3);
    cells_[0] = {
        "vt", 1024, 0, 0.5, 1, " AB, \"x\"\xFF", {"AB", "CD"}, 900, 0.25};
    cells_[1] = {"vt", 1024, 1, 1.0, 1, " AB CD", {"AB", "CD"}, 901, 0.25};
    cells_[2] = {"cwe", 2048, 0, 0.0, 1, " \n", {"word"}, 1900, 0.125};
  }

  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    EXPECT_TRUE(file.is_open()) << name;
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
  LayoutInfo info_;
  std::vector<RulerCell> cells_;
};

TEST_F(LayoutsTest, NamesFoldersAfterPolicyAndShareLeftOut) {
  EXPECT_EQ(
      kvpress_folder(info_, 1024), "ruler__1024__org-A--model-8B__knorm__0.75");
  EXPECT_EQ(ruler_folder(info_, 1024), "knorm-256/1024");
  info_.spec.cache_type = "int8";
  EXPECT_THAT(kvpress_folder(info_, 1024), HasSubstr("__knorm-int8__0.75"));
  EXPECT_EQ(ruler_folder(info_, 1024), "knorm-int8-256/1024");
  info_.spec.cache_type = "f16";
  info_.limits = [](std::size_t) { return std::optional<Limits>(); };
  info_.spec.policy = "full";
  EXPECT_THAT(kvpress_folder(info_, 1024), HasSubstr("__full__0.00"));
  EXPECT_EQ(ruler_folder(info_, 1024), "full/1024");
}

TEST_F(LayoutsTest, WritesWhatKvpressWrites) {
  write_kvpress(folder_, info_, cells_);
  const std::string run = "ruler__1024__org-A--model-8B__knorm__0.75/";
  EXPECT_EQ(
      read(run + "predictions.csv"),
      "task,question,answer_prefix,answer,max_new_tokens,predicted_answer,"
      "compression_ratio\n"
      "vt,\"\n\nQuestion, \"\"quoted\"\"?\n\",Answer:,\"['AB', 'CD']\",30,"
      "\" AB, \"\"x\"\"\xEF\xBF\xBD\",0.7500\n"
      "vt,\"\n\nQuestion, \"\"quoted\"\"?\n\",Answer:,\"['AB', 'CD']\",30,"
      " AB CD,0.7500\n");
  EXPECT_EQ(
      Json::parse(read(run + "metrics.json")),
      Json::parse(R"({"vt": {"string_match": 75.0}})"));
  const std::string config = read(run + "config.yaml");
  for (const char* line :
       {"dataset: ruler\n",
        "data_dir: \"1024\"\n",
        "model: \"org/A__model 8B\"\n",
        "press_name: knorm\n",
        "compression_ratio: 0.7500\n",
        "query_aware: false\n",
        "seed: 7\n",
        "budget: 256\n"}) {
    EXPECT_THAT(config, HasSubstr(line));
  }
  EXPECT_EQ(
      Json::parse(
          read("ruler__2048__org-A--model-8B__knorm__0.88/metrics.json")),
      Json::parse(R"({"cwe": {"string_match": 0.0}})"));
}

TEST_F(LayoutsTest, WritesWhatRulerWrites) {
  write_ruler(folder_, info_, cells_);
  const std::string lines = read("knorm-256/1024/vt.jsonl");
  const Json first = Json::parse(lines.substr(0, lines.find('\n')));
  EXPECT_EQ(first, Json::parse(R"({"index": 0, "pred": " AB, \"x\"\uFFFD",
          "input": "Context 0.\n\nQuestion, \"quoted\"?\nAnswer:",
          "outputs": ["AB", "CD"], "others": {}, "truncation": -1,
          "length": 930})"));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2);
  EXPECT_EQ(
      read("knorm-256/1024/summary.csv"),
      "0,1\nTasks,vt\nScore,75.00\nNulls,0/2\n");
  EXPECT_EQ(
      read("knorm-256/2048/summary.csv"),
      "0,1\nTasks,cwe\nScore,0.00\nNulls,1/1\n");
}

TEST_F(LayoutsTest, RefusesAFolderThatCannotBeMade) {
  EXPECT_NO_THROW(check_directory(folder_ / "a" / "b"));
  EXPECT_FALSE(std::filesystem::exists(folder_));
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "file") << "x";
  for (const char* name : {"file", "file/deeper"}) {
    EXPECT_THAT(
        error_of([&] { check_directory(folder_ / name); }),
        IsError(ErrorKind::kFile, "is not a directory"));
  }
  EXPECT_EQ(
      std::distance(
          std::filesystem::directory_iterator(folder_),
          std::filesystem::directory_iterator()),
      1);
}

}  // namespace
}  // namespace qfilters::eval
