#include "eval/text.h"

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "unit/fake_session.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::byte_codec;
using test::error_of;
using test::IsError;

class TextTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("qfilters_text_" + std::to_string(getpid()));
  }

  void TearDown() override { std::filesystem::remove(path_); }

  void write(const std::string& text) const {
    std::ofstream(path_, std::ios::binary) << text;
  }

  std::filesystem::path path_;
};

/// Several slices; `breaks` decides where lines end.
std::string long_text(std::size_t bytes, std::size_t breaks) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) {
    const bool line_end = breaks != 0 && i % breaks == breaks - 1;
    text += line_end ? '\n' : static_cast<char>('a' + i % 23);
  }
  return text;
}

std::string bytes_of(const std::vector<Token>& tokens) {
  std::string text;
  for (const Token token : tokens) {
    text += static_cast<char>(token);
  }
  return text;
}

TEST_F(TextTest, ReadsEveryByteOnceWhereverSlicesEnd) {
  for (const std::size_t breaks : {0U, 1U, 100U, 65536U, 70000U}) {
    const std::string text = long_text(200000, breaks);
    write(text);
    EXPECT_TRUE(bytes_of(read_tokens(path_, byte_codec(), 0, 200000)) == text)
        << breaks;
  }
}

TEST_F(TextTest, SkipsTokens) {
  const std::string text = long_text(200000, 77);
  write(text);
  EXPECT_EQ(
      bytes_of(read_tokens(path_, byte_codec(), 66000, 500)),
      text.substr(66000, 500));
}

TEST_F(TextTest, NeverCutsACharacterInTwo) {
  std::string text;
  while (text.size() < 150000) {
    text += "\xE2\x82\xAC";
  }
  write(text);
  Codec codec = byte_codec();
  const auto tokenize = codec.tokenize;
  codec.tokenize = [&](std::string_view slice) {
    EXPECT_EQ(slice.size() % 3, 0U);
    return tokenize(slice);
  };
  EXPECT_EQ(read_tokens(path_, codec, 0, text.size()).size(), text.size());
}

TEST_F(TextTest, SaysHowShortATextIs) {
  write("abc");
  EXPECT_THAT(
      error_of([&] { (void)read_tokens(path_, byte_codec(), 1, 3); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "is too short: 3 tokens, but 3 are needed after skipping 1"));
  EXPECT_EQ(bytes_of(read_tokens(path_, byte_codec(), 1, 2)), "bc");
}

TEST_F(TextTest, NamesAFileThatCannotBeRead) {
  EXPECT_THAT(
      error_of([&] { (void)read_tokens(path_, byte_codec(), 0, 1); }),
      IsError(ErrorKind::kFile, path_.string() + ": No such file"));
  EXPECT_THAT(
      error_of([&] { (void)hash_file(path_); }),
      IsError(ErrorKind::kFile, path_.string()));
  EXPECT_THAT(
      error_of([&] { (void)hash_file(::testing::TempDir()); }),
      IsError(ErrorKind::kFile, "Is a directory"));
}

TEST_F(TextTest, HashesAsFnv1a) {
  write("");
  EXPECT_EQ(hash_file(path_), "cbf29ce484222325");
  write("foobar");  // from the reference test vectors
  EXPECT_EQ(hash_file(path_), "85944171f73967e8");
}

}  // namespace
}  // namespace qfilters::eval
