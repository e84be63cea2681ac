#include "qfilters/error.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

TEST(ErrorTest, CarriesKindAndMessage) {
  const Error error(ErrorKind::kShape, "select: keep=9 exceeds rows=8");
  EXPECT_EQ(error.kind(), ErrorKind::kShape);
  EXPECT_STREQ(error.what(), "select: keep=9 exceeds rows=8");
}

TEST(ErrorTest, IsCaughtAsRuntimeError) {
  try {
    throw Error(ErrorKind::kFile, "gone");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "gone");
  }
}

TEST(ErrorTest, CopiesWithoutThrowing) {
  EXPECT_TRUE(std::is_nothrow_copy_constructible_v<Error>);
}

}  // namespace
}  // namespace qfilters
