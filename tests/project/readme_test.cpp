// The programs on these pages are those that are compiled, and they print what
// the pages say.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

struct Page {
  const char* name;
  const char* path;
  const char* source;
  const char* program;
};

class ReadmeTest : public ::testing::TestWithParam<Page> {
 protected:
  static std::string read(const std::string& path) {
    std::ifstream in(std::string(QFILTERS_SOURCE_DIR) + "/" + path);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // The first block between fences at or after `from`, `opening` included.
  static std::string block(
      const std::string& text, const std::string& opening, std::size_t from) {
    const std::size_t begin = text.find(opening, from) + opening.size();
    return text.substr(begin, text.find("```", begin) - begin);
  }
};

TEST_P(ReadmeTest, ShowsTheProgramThatIsCompiledAndWhatItPrints) {
  const std::string page = read(GetParam().path);
  const std::string source = read(GetParam().source);
  ASSERT_FALSE(source.empty());
  const std::size_t shown = page.find("```cpp\n" + source + "```");
  ASSERT_NE(shown, std::string::npos);

  const std::string command =
      std::string(QFILTERS_BINARY_DIR) + "/bin/" + GetParam().program;
  std::FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string printed;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe))
    printed += static_cast<char>(c);
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_EQ(block(page, "\n```\n\n```\n", shown), printed);
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    ReadmeTest,
    ::testing::Values(
        Page{"Readme", "README.md", "examples/readme.cpp", "readme_example"},
        Page{
            "Reference",
            "docs/reference.md",
            "examples/reference.cpp",
            "reference_example"}),
    [](const auto& page) { return std::string(page.param.name); });

}  // namespace
}  // namespace qfilters
