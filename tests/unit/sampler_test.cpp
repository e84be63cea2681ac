#include "apps/qfilters/sampler.h"

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "unit/test_util.h"

namespace qfilters::cli {
namespace {

using test::error_of;
using test::IsError;

// exp(0) : exp(ln 2) : exp(ln 4) = 1 : 2 : 4
const std::vector<float> kLogits{0.0F, std::log(2.0F), std::log(4.0F), -100.0F};

SamplerOptions options(
    double temperature, std::size_t top_k = 0, double top_p = 1) {
  return {temperature, top_k, top_p, 1};
}

std::vector<int> histogram(const SamplerOptions& how, int picks) {
  Sampler sampler(how, {});
  std::vector<int> counts(kLogits.size());
  for (int i = 0; i < picks; ++i) {
    ++counts[static_cast<std::size_t>(sampler.pick(kLogits))];
  }
  return counts;
}

TEST(SamplerTest, TakesTheLargestLogitAtTemperatureZero) {
  EXPECT_EQ(histogram(options(0), 10)[2], 10);
  Sampler sampler(options(0), {});
  EXPECT_EQ(sampler.pick(std::vector<float>{1.0F, 3.0F, 3.0F}), 1);
}

TEST(SamplerTest, FollowsTheSoftmax) {
  const std::vector<int> counts = histogram(options(1), 7000);
  // Five standard deviations of a binomial with 7000 draws.
  EXPECT_NEAR(counts[0], 1000, 150);
  EXPECT_NEAR(counts[1], 2000, 190);
  EXPECT_NEAR(counts[2], 4000, 210);
  EXPECT_EQ(counts[3], 0);
}

TEST(SamplerTest, SharpensWithALowTemperature) {
  // At 0.5 the weights square: 1 : 4 : 16.
  EXPECT_NEAR(histogram(options(0.5), 2100)[2], 1600, 100);
}

TEST(SamplerTest, CutsToTheTopK) {
  const std::vector<int> counts = histogram(options(1, 2), 600);
  EXPECT_EQ(counts[0], 0);
  EXPECT_NEAR(counts[2], 400, 60);
  EXPECT_EQ(histogram(options(1, 1), 50)[2], 50);
}

TEST(SamplerTest, CutsToTheTopP) {
  // 4/7 alone reach 0.5; 0.6 needs the second, 0.9 the third.
  EXPECT_EQ(histogram(options(1, 0, 0.5), 50)[2], 50);
  const std::vector<int> two = histogram(options(1, 0, 0.6), 600);
  EXPECT_EQ(two[0], 0);
  EXPECT_GT(two[1], 0);
  EXPECT_GT(histogram(options(1, 0, 0.9), 600)[0], 0);
}

TEST(SamplerTest, RepeatsItselfWithTheSameSeed) {
  std::set<std::vector<llama::Token>> runs;
  for (const std::uint64_t seed : {1U, 1U, 2U}) {
    SamplerOptions how = options(1);
    how.seed = seed;
    Sampler sampler(how, {});
    std::vector<llama::Token> picks;
    picks.reserve(50);
    for (int i = 0; i < 50; ++i) {
      picks.push_back(sampler.pick(kLogits));
    }
    runs.insert(picks);
  }
  EXPECT_EQ(runs.size(), 2U);
}

TEST(SamplerTest, GivesTheSamePicksWithEveryStandardLibrary) {
  // mt19937_64 with seed 1: the first outputs are fixed by the standard, and
  // nothing else that a library may choose takes part.
  Sampler sampler(options(1), {});
  std::vector<llama::Token> picks;
  picks.reserve(8);
  for (int i = 0; i < 8; ++i) {
    picks.push_back(sampler.pick(kLogits));
  }
  std::mt19937_64 random(1);
  for (const llama::Token pick : picks) {
    const double u = static_cast<double>(random() >> 11U) * 0x1.0p-53 * 7;
    EXPECT_EQ(pick, u < 4 ? 2 : u < 6 ? 1 : 0);
  }
}

TEST(SamplerTest, NeverPicksABannedToken) {
  Sampler greedy(options(0), {2});
  EXPECT_EQ(greedy.pick(kLogits), 1);
  Sampler sampler(options(1), {2, 1});
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(sampler.pick(kLogits) % 3, 0);
  }
}

TEST(SamplerTest, RefusesOptionsOutsideTheirRange) {
  EXPECT_THAT(
      error_of([] { Sampler(options(-1), {}); }),
      IsError(ErrorKind::kInvalidArgument, "temp"));
  EXPECT_TRUE(error_of([] { Sampler(options(std::nan("")), {}); }));
  EXPECT_THAT(
      error_of([] { Sampler(options(1, 0, 0), {}); }),
      IsError(ErrorKind::kInvalidArgument, "top-p"));
  EXPECT_TRUE(error_of([] { Sampler(options(1, 0, 1.1), {}); }));
}

TEST(SamplerTest, GoesOnFromASavedState) {
  Sampler straight(options(1), {});
  for (int i = 0; i < 5; ++i)
    (void)straight.pick(kLogits);
  Sampler resumed({1, 0, 1, 99}, {});
  resumed.restore(straight.state());
  std::vector<llama::Token> a;
  std::vector<llama::Token> b;
  for (int i = 0; i < 400; ++i) {
    a.push_back(straight.pick(kLogits));
    b.push_back(resumed.pick(kLogits));
  }
  EXPECT_EQ(a, b);
  EXPECT_GT(std::set<llama::Token>(a.begin(), a.end()).size(), 1U);
}

TEST(SamplerTest, RefusesAStateThatIsNone) {
  Sampler sampler(options(1), {});
  const std::string state = sampler.state();
  for (const std::string& bad :
       {std::string(),
        std::string("1 2 3"),
        state + " 7",
        "x" + state,
        " " + state}) {
    EXPECT_THAT(
        error_of([&] { sampler.restore(bad); }),
        IsError(ErrorKind::kFile, "sampler"));
    EXPECT_EQ(sampler.state(), state);
  }
}

}  // namespace
}  // namespace qfilters::cli
