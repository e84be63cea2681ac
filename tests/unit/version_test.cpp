#include "qfilters/version.h"

#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

TEST(VersionTest, NamesItsThreeNumbers) {
  EXPECT_EQ(
      std::string(kVersion),
      std::to_string(kVersionMajor) + "." + std::to_string(kVersionMinor) +
          "." + std::to_string(kVersionPatch));
}

TEST(VersionTest, AgreesWithTheBuild) {
  std::ifstream file(QFILTERS_SOURCE_DIR "/CMakeLists.txt");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_NE(
      text.str().find("VERSION " + std::string(kVersion) + "\n"),
      std::string::npos);
}

}  // namespace
}  // namespace qfilters
