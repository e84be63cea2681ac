#include "apps/qfilters/utf8_stream.h"

#include <string>

#include <gtest/gtest.h>

namespace qfilters::cli {
namespace {

// a (1 byte), e acute (2), euro (3), a clef (4).
const std::string kText = "a\xC3\xA9\xE2\x82\xAC\xF0\x9D\x84\x9E";

TEST(Utf8StreamTest, GivesWholeCharactersAtOnce) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push(kText), kText);
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8StreamTest, HoldsAnIncompleteCharacterBack) {
  Utf8Stream stream;
  std::string out;
  for (const char byte : kText) {
    const std::string whole = stream.push({&byte, 1});
    // Nothing or one whole character, which starts with no continuation byte.
    if (!whole.empty()) {
      EXPECT_NE(static_cast<unsigned char>(whole[0]) & 0xC0U, 0x80U);
    }
    out += whole;
  }
  EXPECT_EQ(out, kText);
}

TEST(Utf8StreamTest, ReplacesWhatIsNeverCompleted) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xE2\x82"), "a");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8StreamTest, ReplacesWhatAnotherCharacterBreaksOff) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xE2\x82"), "a");
  EXPECT_EQ(stream.held(), "\xE2\x82");
  EXPECT_EQ(
      stream.push("b"),
      "\xEF\xBF\xBD"
      "b");
  EXPECT_EQ(stream.held(), "");
}

TEST(Utf8StreamTest, PassesInvalidBytesOnInsteadOfWaiting) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\x80\x80\x80\x80"), "\x80\x80\x80\x80");
  EXPECT_EQ(stream.push("\xFF"), "\xFF");
}

}  // namespace
}  // namespace qfilters::cli
