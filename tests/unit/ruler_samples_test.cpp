// What holds for every sample of every task of RULER.
#include "eval/tasks/ruler_samples.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "unit/fake_session.h"
#include "unit/generators.h"

namespace qfilters::eval {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using test::any_of;
using test::byte_codec;
using test::error_of;
using test::IsError;

/// Sentences of many different words.
const Haystack& haystack() {
  static const Haystack made([] {
    std::string text;
    test::Random random(7);
    while (text.size() < 20000) {
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 5; ++j)
          text += static_cast<char>('a' + random.below(26));
        text += i < 7 ? " " : ". ";
      }
    }
    return text;
  }());
  return made;
}

RulerSample make(
    const char* task,
    std::size_t length = 4000,
    std::size_t index = 0,
    std::uint64_t seed = 0) {
  return make_ruler_sample(
      byte_codec({1}),
      haystack(),
      find_ruler_task(task),
      {length, index, seed});
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t times = 0;
  for (std::size_t at = text.find(part); at != text.npos;
       at = text.find(part, at + 1)) {
    ++times;
  }
  return times;
}

/// A length with room for every task. In bytes, which take more tokens than
/// words do, 30 times ten words do not fit into 4,096.
std::size_t any_length() {
  return any_of(0, 1) == 0 ? any_of(3000, 3500) : any_of(5000, 9000);
}

RC_GTEST_PROP(RulerSamplesTest, FitAndHoldTheirAnswersInTheContext, ()) {
  const RulerTask& task = ruler_tasks()[any_of(0, ruler_tasks().size() - 1)];
  const RulerPlace place{any_length(), any_of(0, 3), any_of(0, 50)};
  const Codec codec = byte_codec({1, 2});
  const RulerSample sample = make_ruler_sample(codec, haystack(), task, place);
  // Bytes are tokens; two stand in front.
  const std::size_t size = 2 + sample.context.size() + sample.question.size() +
                           sample.answer_prefix.size();
  RC_ASSERT(sample.tokens == size);
  const std::size_t answer =
      std::max(task.generate, reference_answer(sample).size());
  RC_ASSERT(size + answer <= place.length);
  // A unit of the largest kind would not fit any more.
  RC_ASSERT(size + answer + Haystack::kLongest > place.length);
  RC_ASSERT(!sample.references.empty());
  std::set<std::string> different;
  for (const std::string& reference : sample.references) {
    RC_ASSERT(sample.context.find(reference) != std::string::npos);
    RC_ASSERT(sample.question.find(reference) == std::string::npos);
    RC_ASSERT(sample.answer_prefix.find(reference) == std::string::npos);
    RC_ASSERT(different.insert(reference).second);
  }
}

RC_GTEST_PROP(RulerSamplesTest, DependOnTheirPlaceAndOnNothingElse, ()) {
  const RulerTask& task = ruler_tasks()[any_of(0, ruler_tasks().size() - 1)];
  const RulerPlace place{any_length(), any_of(0, 9), any_of(0, 50)};
  const auto context = [&](RulerPlace at) {
    return make_ruler_sample(byte_codec(), haystack(), task, at).context;
  };
  const std::string made = context(place);
  RC_ASSERT(context(place) == made);
  RC_ASSERT(context({place.length, place.index + 1, place.seed}) != made);
  RC_ASSERT(context({place.length, place.index, place.seed + 1}) != made);
  RC_ASSERT(context({place.length + 500, place.index, place.seed}) != made);
}

TEST(RulerSamplesTest, HideOneNumberInNoise) {
  const RulerSample sample = make("niah_single_1");
  ASSERT_EQ(sample.references.size(), 1U);
  EXPECT_EQ(count(sample.context, "The secret number of "), 1U);
  EXPECT_THAT(sample.context, HasSubstr(" is " + sample.references[0] + "."));
  EXPECT_GT(count(sample.context, "Nobody looked up."), 10U);
  EXPECT_THAT(sample.question, StartsWith("\n\nQuestion: What is the secret"));
}

TEST(RulerSamplesTest, HideNeedlesInTheUsersText) {
  for (const char* task :
       {"niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multivalue"}) {
    const RulerSample sample = make(task);
    EXPECT_THAT(sample.context, Not(HasSubstr("Nobody")));
    const std::size_t own = static_cast<std::size_t>(std::count_if(
        haystack().sentences.begin(),
        haystack().sentences.end(),
        [&](const std::string& sentence) {
          return sample.context.find(sentence) != std::string::npos;
        }));
    EXPECT_GT(own, 40U) << task;
  }
  EXPECT_EQ(make("niah_single_3").references[0].size(), 36U);
}

TEST(RulerSamplesTest, HideOtherKeysThanTheOneAskedFor) {
  const RulerSample few = make("niah_multikey_1");
  EXPECT_EQ(count(few.context, "The secret number of "), 4U);
  EXPECT_EQ(few.references.size(), 1U);
  const RulerSample numbers = make("niah_multikey_2");
  EXPECT_GT(count(numbers.context, "The secret number of "), 50U);
  const RulerSample uuids = make("niah_multikey_3");
  EXPECT_GT(count(uuids.context, "The secret identifier of "), 20U);
  EXPECT_EQ(uuids.references.size(), 1U);
}

TEST(RulerSamplesTest, AskForSeveralValuesOrKeys) {
  const RulerSample values = make("niah_multivalue");
  EXPECT_EQ(values.references.size(), 4U);
  EXPECT_EQ(count(values.context, "The secret number of "), 4U);
  const std::string key =
      values.answer_prefix.substr(values.answer_prefix.find(" of ") + 4, 9);
  EXPECT_EQ(count(values.context, key), 4U);
  const RulerSample keys = make("niah_multiquery");
  EXPECT_EQ(keys.references.size(), 4U);
  EXPECT_EQ(count(keys.answer_prefix, ", "), 2U);
  EXPECT_EQ(count(keys.answer_prefix, " and "), 1U);
  EXPECT_THAT(
      reference_answer(keys), StartsWith(" " + keys.references[0] + ", "));
}

TEST(RulerSamplesTest, PassAValueFromVariableToVariable) {
  const RulerSample sample = make("vt");
  ASSERT_EQ(sample.references.size(), 5U);
  std::size_t before = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    const std::string from =
        i == 0 ? "" : "VAR " + sample.references[i - 1] + ".";
    const std::size_t at =
        sample.context.find("VAR " + sample.references[i] + " = " + from);
    ASSERT_NE(at, std::string::npos);
    EXPECT_GT(at, before);  // a value is never used before it is given
    before = at;
  }
}

/// The numbered list at the end of a context.
std::map<std::string, std::size_t> listed_words(const std::string& context) {
  std::istringstream in(context.substr(context.rfind("\n\n") + 2));
  std::map<std::string, std::size_t> words;
  std::string number;
  std::string word;
  std::size_t next = 1;
  while (in >> number >> word) {
    EXPECT_EQ(number, std::to_string(next++) + ".");
    ++words[word];
  }
  return words;
}

TEST(RulerSamplesTest, RepeatTenWordsMoreThanAllOthers) {
  for (const auto& [length, common, rare] :
       {std::tuple(4000U, 6U, 1U), std::tuple(9000U, 30U, 3U)}) {
    const RulerSample sample = make("cwe", length);
    const auto words = listed_words(sample.context);
    ASSERT_EQ(sample.references.size(), 10U);
    EXPECT_GT(words.size(), 10U);
    for (const auto& [word, times] : words) {
      const bool asked =
          std::find(sample.references.begin(), sample.references.end(), word) !=
          sample.references.end();
      EXPECT_EQ(times, asked ? common : rare) << word;
    }
  }
}

TEST(RulerSamplesTest, HaveThreeMostFrequentWordsBesideTheFiller) {
  for (const std::size_t length : {1500U, 4000U, 9000U}) {
    const RulerSample sample = make("fwe", length);
    std::istringstream in(
        sample.context.substr(sample.context.rfind("\n\n") + 2));
    std::map<std::string, std::size_t> words;
    for (std::string word; in >> word;)
      ++words[word];
    std::vector<std::pair<std::size_t, std::string>> order;
    for (const auto& [word, times] : words)
      order.emplace_back(times, word);
    std::sort(order.rbegin(), order.rend());
    EXPECT_EQ(order[0].second, "....");
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(order[i + 1].second, sample.references[i]);
      EXPECT_GT(order[i + 1].first, order[i + 2].first);
    }
  }
}

TEST(RulerSamplesTest, SayWhenThereIsNoRoom) {
  for (const RulerTask& task : ruler_tasks()) {
    const auto refusal = [&](std::size_t length, const Haystack& text) {
      return error_of([&] {
        (void)make_ruler_sample(byte_codec(), text, task, {length, 0, 0});
      });
    };
    EXPECT_THAT(
        refusal(100, haystack()),
        IsError(
            ErrorKind::kInvalidArgument,
            "length 100 has no room for task " + std::string(task.name)));
  }
  EXPECT_THAT(
      error_of([&] {
        (void)make_ruler_sample(
            byte_codec(), Haystack(), find_ruler_task("niah_single_2"), {900});
      }),
      IsError(ErrorKind::kInvalidArgument, "no sentence"));
  EXPECT_THAT(
      error_of([] { (void)find_ruler_task("qa_1"); }),
      IsError(ErrorKind::kInvalidArgument, "unknown task 'qa_1'; known: niah"));
}

TEST(RulerSamplesTest, NameTheLeastLengthThatWorks) {
  for (const RulerTask& task : ruler_tasks()) {
    const auto check = [&](std::size_t length) {
      // The words depend on the length, so their sizes may differ a little.
      check_ruler_room(byte_codec(), haystack(), task, {length, 0, 0});
    };
    EXPECT_THROW(check(200), Error) << task.name;
    EXPECT_NO_THROW(check(3500)) << task.name;
  }
}

}  // namespace
}  // namespace qfilters::eval
