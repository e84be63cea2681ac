#include "eval/tasks/haystack.h"

#include <numeric>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "unit/generators.h"

namespace qfilters::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(HaystackTest, CutsAfterSentences) {
  EXPECT_THAT(
      Haystack("One. Two!\n\nThree? Version 1.2 is out").sentences,
      ElementsAre("One. ", "Two!\n\n", "Three? ", "Version 1.2 is out"));
  EXPECT_THAT(Haystack("").sentences, IsEmpty());
}

TEST(HaystackTest, CutsAtASpaceWhereNoSentenceEnds) {
  std::string text;
  while (text.size() < 1000)
    text += "word ";
  const Haystack haystack(text);
  for (const std::string& piece : haystack.sentences) {
    EXPECT_LE(piece.size(), Haystack::kLongest);
    EXPECT_EQ(piece.back(), ' ');
  }
}

TEST(HaystackTest, NeverCutsACharacter) {
  std::string text = "x";
  while (text.size() < 2000)
    text += "\xE2\x82\xAC";
  for (const std::string& piece : Haystack(text).sentences) {
    EXPECT_NE(static_cast<unsigned char>(piece.front()) & 0xC0U, 0x80U);
  }
}

TEST(HaystackTest, FindsPlainWordsOnce) {
  EXPECT_THAT(
      Haystack("The tree and the other tree; Upper x_long naïve its re-read "
               "extraordinary it's done")
          .words,
      ElementsAre("tree", "other", "read", "done"));
}

RC_GTEST_PROP(HaystackTest, PiecesJoinedAreTheText, ()) {
  std::string text;
  for (std::size_t i = test::any_of(0, 3000); i-- > 0;) {
    text += *rc::gen::element('a', 'b', ' ', '\n', '.', '?', '\xC3', '\xA9');
  }
  const Haystack haystack(text);
  RC_ASSERT(
      std::accumulate(
          haystack.sentences.begin(),
          haystack.sentences.end(),
          std::string()) == text);
  for (const std::string& piece : haystack.sentences)
    RC_ASSERT(!piece.empty());
}

}  // namespace
}  // namespace qfilters::eval
