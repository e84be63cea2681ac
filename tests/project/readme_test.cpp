// The README's program is the one that is compiled, and it does what it says.
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

std::string read(const std::string& path) {
  std::ifstream in(std::string(QFILTERS_SOURCE_DIR) + "/" + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(ReadmeTest, ShowsTheExampleThatIsCompiled) {
  const std::string example = read("examples/readme.cpp");
  ASSERT_FALSE(example.empty());
  EXPECT_NE(read("README.md").find(example), std::string::npos);
}

TEST(ReadmeTest, ExampleKeepsItsBudget) {
  const std::string command =
      std::string(QFILTERS_BINARY_DIR) + "/bin/readme_example";
  std::FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::array<char, 256> line{};
  const char* got = std::fgets(line.data(), line.size(), pipe);
  EXPECT_EQ(pclose(pipe), 0);
  ASSERT_NE(got, nullptr);
  EXPECT_STREQ(line.data(), "1000 tokens seen, 128 rows kept per head\n");
}

}  // namespace
}  // namespace qfilters
