#include "qfilters/fingerprint.h"

#include <cstdint>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace qfilters {
namespace {

std::string hash_of(std::string_view text) {
  Fingerprint fingerprint;
  fingerprint.add(text);
  return fingerprint.hex();
}

// Published test vectors of FNV-1a with 64 bits.
TEST(FingerprintTest, AgreesWithPublishedVectors) {
  EXPECT_EQ(hash_of(""), "cbf29ce484222325");
  EXPECT_EQ(hash_of("a"), "af63dc4c8601ec8c");
  EXPECT_EQ(hash_of("foobar"), "85944171f73967e8");
}

TEST(FingerprintTest, DoesNotDependOnHowBytesAreSplit) {
  Fingerprint parts;
  parts.add("foo");
  parts.add("");
  parts.add("bar");
  EXPECT_EQ(parts.hex(), hash_of("foobar"));
}

TEST(FingerprintTest, TakesIntegersAsLittleEndianBytes) {
  Fingerprint integer;
  integer.add(std::uint32_t{0x64636261});
  EXPECT_EQ(integer.hex(), hash_of("abcd"));
  Fingerprint negative;
  negative.add(std::int8_t{-1});
  EXPECT_EQ(negative.hex(), hash_of("\xFF"));
}

}  // namespace
}  // namespace qfilters
