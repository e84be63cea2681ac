#include "eval/tasks/word_maker.h"

#include <algorithm>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace qfilters::eval {
namespace {

TEST(WordMakerTest, MakesWhatItSays) {
  WordMaker maker(1);
  EXPECT_TRUE(
      std::regex_match(maker.word(3), std::regex("([^aeiou][aeiou]){3}")));
  EXPECT_TRUE(std::regex_match(maker.name(), std::regex("[a-z]{4}-[a-z]{4}")));
  EXPECT_TRUE(std::regex_match(maker.number(7), std::regex("[1-9][0-9]{6}")));
  EXPECT_TRUE(std::regex_match(maker.variable(5), std::regex("[A-Z]{5}")));
  EXPECT_TRUE(std::regex_match(
      maker.uuid(),
      std::regex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-"
                 "[0-9a-f]{12}")));
}

TEST(WordMakerTest, NeverGivesTheSameTwiceEvenWhenShortOnesAreTaken) {
  WordMaker maker(2);
  std::set<std::string> words;
  std::set<std::string> numbers;
  for (int i = 0; i < 200; ++i) {
    words.insert(maker.word(1));  // only 65 have one syllable
    numbers.insert(maker.number(1));
  }
  EXPECT_EQ(words.size(), 200U);
  EXPECT_EQ(numbers.size(), 200U);
}

TEST(WordMakerTest, IsTheSameOnEveryMachine) {
  // A change of these changes every sample.
  WordMaker maker(0);
  EXPECT_EQ(maker.below(1000), 694U);
  EXPECT_EQ(maker.word(3), "molepo");
}

TEST(WordMakerTest, ShufflesWithoutLoss) {
  WordMaker maker(3);
  std::vector<int> values{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<int> before = values;
  maker.shuffle(values);
  EXPECT_NE(values, before);
  std::sort(values.begin(), values.end());
  EXPECT_EQ(values, before);
}

}  // namespace
}  // namespace qfilters::eval
