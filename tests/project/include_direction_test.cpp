// Guards the direction of includes that ARCHITECTURE.md describes.
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

namespace fs = std::filesystem;

struct Rule {
  std::string folder;
  std::vector<std::string> may_include;  // prefixes of quoted includes
  std::string may_not_include;           // regex over <...> includes
};

const std::string kThirdParty =
    "(hwy/|Eigen/|omp\\.h|llama|ggml|gguf|zip\\.h|nlohmann/|fmt/|CLI/).*";

// Quoted includes of each part; a part's own folder is always allowed.
const std::vector<Rule> kRules = {
    {"include/qfilters", {"qfilters/"}, kThirdParty},
    {"src/kernels", {"kernels/"}, "(Eigen/|omp\\.h|llama|ggml|zip\\.h).*"},
    {"src/core", {"qfilters/", "kernels/", "core/"}, "(llama|ggml|zip\\.h).*"},
    {"src/io", {"qfilters/", "kernels/", "io/"}, "(llama|ggml|Eigen/).*"},
    {"src/c_api", {"qfilters/", "c_api/"}, kThirdParty},
    {"adapters/llama", {"qfilters/", "llama/"}, "(hwy/|Eigen/|zip\\.h).*"},
    {"policies", {"qfilters/", "policies/"}, kThirdParty},
    {"eval",
     {"qfilters/", "llama/", "policies/", "eval/"},
     "(hwy/|Eigen/|llama\\.h|ggml).*"},
    {"apps",
     {"qfilters/", "llama/", "policies/", "eval/", "apps/"},
     "(hwy/|Eigen/|llama\\.h|ggml).*"},
    {"examples", {"qfilters/", "llama/"}, "(hwy/|Eigen/|ggml).*"},
    // Benchmarks also time what others have.
    {"bench", {"qfilters/", "llama/", "policies/", "bench/"}, "Eigen/.*"},
};

std::vector<fs::path> sources(const fs::path& folder) {
  std::vector<fs::path> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto extension = entry.path().extension();
    if (extension == ".h" || extension == ".c" || extension == ".cpp")
      out.push_back(entry.path());
  }
  return out;
}

std::vector<std::string> violations(const Rule& rule, const fs::path& file) {
  static const std::regex include(
      "\\s*#\\s*include\\s*([<\"])([^>\"]+)[>\"].*");
  std::vector<std::string> found;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, include)) continue;
    const std::string target = match[2];
    bool allowed = true;
    if (match[1] == "<") {
      allowed = !std::regex_match(target, std::regex(rule.may_not_include));
    } else {
      allowed = fs::exists(file.parent_path() / target) &&
                target.find('/') == std::string::npos;
      for (const std::string& prefix : rule.may_include) {
        allowed = allowed || target.starts_with(prefix);
      }
    }
    if (!allowed) found.push_back(file.string() + ": " + line);
  }
  return found;
}

TEST(IncludeDirectionTest, EveryPartIncludesOnlyWhatItMay) {
  for (const Rule& rule : kRules) {
    const fs::path folder = fs::path(QFILTERS_SOURCE_DIR) / rule.folder;
    ASSERT_TRUE(fs::exists(folder)) << folder;
    const auto files = sources(folder);
    EXPECT_FALSE(files.empty()) << folder;
    for (const fs::path& file : files) {
      for (const std::string& each : violations(rule, file)) {
        ADD_FAILURE() << each;
      }
    }
  }
}

TEST(IncludeDirectionTest, SeesAViolation) {
  const fs::path file =
      fs::path(QFILTERS_BINARY_DIR) / "include_direction_probe.h";
  std::ofstream(file) << "#include <vector>\n#include <hwy/highway.h>\n"
                         "#include \"core/half.h\"\n"
                         "#include \"qfilters/error.h\"\n";
  EXPECT_EQ(violations(kRules.front(), file).size(), 2U);
  fs::remove(file);
}

}  // namespace
}  // namespace qfilters
