#include "qfilters/key_regression.h"

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::error_of;
using test::IsError;
using test::kNaN;
using test::random_filter;

// What a key is worth by the definition of a quadratic score.
double worth_of(std::span<const float> key, std::span<const float> c) {
  double sum = 0;
  double squares = 0;
  for (std::size_t d = 0; d < key.size(); ++d) {
    sum += (c[d] + c[key.size() + d] * key[d]) * key[d];
    squares += key[d] * key[d];
  }
  return sum + c[2 * key.size()] * std::sqrt(squares) + c[2 * key.size() + 1];
}

struct Sample {
  std::vector<float> keys;
  std::vector<float> worth;
};

Sample sample_of(
    std::uint64_t seed,
    std::size_t count,
    std::size_t dim,
    std::span<const float> coefficients) {
  Sample out{random_filter(seed, count * dim), {}};
  for (std::size_t i = 0; i < count; ++i) {
    out.worth.push_back(static_cast<float>(
        worth_of(std::span(out.keys).subspan(i * dim, dim), coefficients)));
  }
  return out;
}

TEST(KeyRegressionTest, FindsTheCoefficientsThatMadeTheWorth) {
  for (const std::size_t dim : {1U, 3U, 16U}) {
    SCOPED_TRACE(dim);
    KeyRegression regression({{2, dim}});
    std::vector<std::vector<float>> truth;
    for (std::size_t h = 0; h < 2; ++h) {
      truth.push_back(random_filter(10 * dim + h, quadratic_size(dim)));
      const Sample sample = sample_of(h + 1, 600, dim, truth[h]);
      regression.add(0, h, sample.keys, sample.worth);
    }
    const FilterBank found = regression.finish({}, 1e-9);
    EXPECT_EQ(found.layer(0).heads, 2U);
    EXPECT_EQ(found.layer(0).dim, quadratic_size(dim));
    EXPECT_EQ(found.metadata().n_samples, 600U);
    // In one dimension |k| and k * k are distinct, so all terms are known.
    for (std::size_t h = 0; h < 2; ++h) {
      const Sample fresh = sample_of(77, 50, dim, truth[h]);
      for (std::size_t i = 0; i < 50; ++i) {
        const auto key = std::span(fresh.keys).subspan(i * dim, dim);
        EXPECT_NEAR(
            worth_of(key, found.layer(0).head(h)), fresh.worth[i], 2e-4);
      }
    }
  }
}

TEST(KeyRegressionTest, DoesNotCareHowKeysAreCut) {
  const auto truth = random_filter(3, quadratic_size(5));
  const Sample sample = sample_of(4, 200, 5, truth);
  KeyRegression whole({{1, 5}});
  whole.add(0, 0, sample.keys, sample.worth);
  KeyRegression cut({{1, 5}});
  for (std::size_t i = 0; i < 200; i += 8) {
    cut.add(
        0,
        0,
        std::span(sample.keys).subspan(i * 5, 40),
        std::span(sample.worth).subspan(i, 8));
  }
  const auto a = whole.finish({}).layer(0);
  const auto b = cut.finish({}).layer(0);
  for (std::size_t i = 0; i < a.values.size(); ++i)
    EXPECT_NEAR(a.values[i], b.values[i], 1e-5F * (1 + std::abs(a.values[i])));
}

TEST(KeyRegressionTest, FitsEachScoreAsIfItWereAlone) {
  const std::size_t size = quadratic_size(5);
  const auto keys = random_filter(4, 130 * 5);
  KeyRegression both({{1, 5}}, 2);
  std::vector<float> worth;
  for (const std::uint64_t seed : {21U, 22U}) {
    const auto one = random_filter(seed, 130);
    worth.insert(worth.end(), one.begin(), one.end());
  }
  both.add(0, 0, keys, worth);
  const FilterBank found = both.finish({});
  EXPECT_EQ(found.layer(0).dim, 2 * size);
  EXPECT_EQ(found.metadata().n_samples, 130U);
  for (std::size_t s = 0; s < 2; ++s) {
    KeyRegression alone({{1, 5}});
    alone.add(0, 0, keys, std::span(worth).subspan(s * 130, 130));
    const FilterBank want = alone.finish({});
    for (std::size_t i = 0; i < size; ++i) {
      const float value = want.layer(0).head(0)[i];
      EXPECT_NEAR(
          found.layer(0).head(0)[s * size + i],
          value,
          1e-5F * (1 + std::abs(value)));
    }
  }
}

// The ridge draws towards the mean worth, not towards zero.
TEST(KeyRegressionTest, KnowsTheMeanOfWhatItCannotExplain) {
  KeyRegression regression({{1, 4}});
  const auto keys = random_filter(9, 4 * 500);
  const std::vector<float> worth(500, -7.5F);
  regression.add(0, 0, keys, worth);
  const FilterBank found = regression.finish({}, 1.0);
  const auto head = found.layer(0).head(0);
  EXPECT_NEAR(worth_of(std::span(keys).first(4), head), -7.5, 1e-4);
}

TEST(KeyRegressionTest, IgnoresTermsThatNeverVary) {
  KeyRegression regression({{1, 2}});
  std::vector<float> keys;
  std::vector<float> worth;
  for (int i = 0; i < 100; ++i) {
    keys.insert(keys.end(), {3.0F, static_cast<float>(i % 10)});
    worth.push_back(2.0F * static_cast<float>(i % 10) + 1.0F);
  }
  regression.add(0, 0, keys, worth);
  const FilterBank found = regression.finish({}, 1e-6);
  const auto head = found.layer(0).head(0);
  EXPECT_EQ(head[0], 0.0F);
  EXPECT_EQ(head[2], 0.0F);
  const std::vector<float> key = {3.0F, 4.0F};
  EXPECT_NEAR(worth_of(key, head), 9.0, 0.05);
}

TEST(KeyRegressionTest, GivesZerosToALayerThatSawNothing) {
  KeyRegression regression({{2, 3}, {1, 4}});
  const auto truth = random_filter(3, quadratic_size(4));
  const Sample sample = sample_of(4, 60, 4, truth);
  regression.add(1, 0, sample.keys, sample.worth);
  const FilterBank found = regression.finish({});
  EXPECT_THAT(found.layer(0).values, ::testing::Each(0.0F));
  EXPECT_EQ(found.layer(0).values.size(), 2 * quadratic_size(3));
  EXPECT_EQ(found.metadata().n_samples, 60U);
}

TEST(KeyRegressionTest, RefusesWhatCannotBe) {
  const auto invalid = [](const char* part) {
    return IsError(ErrorKind::kInvalidArgument, part);
  };
  EXPECT_THAT(
      error_of([] { KeyRegression({}); }), invalid("there are no layers"));
  EXPECT_THAT(
      error_of([] {
        KeyRegression({{1, 4}, {0, 4}});
      }),
      invalid("layer 1"));
  EXPECT_THAT(error_of([] { KeyRegression({{1, 0}}); }), invalid("dim=0"));
  EXPECT_THAT(
      error_of([] {
        KeyRegression({{1, 4}}, 0);
      }),
      invalid("scores=0"));

  KeyRegression regression({{2, 2}});
  const std::vector<float> keys = {1, 2, 3, 4};
  const std::vector<float> worth = {1, 2};
  const auto add = [&](std::size_t layer,
                       std::size_t head,
                       std::span<const float> k,
                       std::span<const float> w) {
    return error_of([&] { regression.add(layer, head, k, w); });
  };
  EXPECT_THAT(add(1, 0, keys, worth), invalid("layer=1"));
  EXPECT_THAT(add(0, 2, keys, worth), invalid("kv_head=2"));
  EXPECT_THAT(
      add(0, 0, std::span(keys).first(3), worth),
      IsError(ErrorKind::kShape, "dim=2"));
  EXPECT_THAT(
      add(0, 0, keys, std::span(worth).first(1)),
      IsError(ErrorKind::kShape, "1 of what they are worth"));
  EXPECT_THAT(
      add(0, 0, std::vector<float>{1, 2, kNaN, 4}, worth),
      invalid("not finite"));
  EXPECT_THAT(
      add(0, 0, keys, std::vector<float>{1, kNaN}), invalid("not finite"));
  // Nothing of this was added.
  const auto finish = [&](double ridge) {
    return error_of([&] { static_cast<void>(regression.finish({}, ridge)); });
  };
  EXPECT_THAT(finish(1e-3), invalid("no keys seen"));
  regression.add(0, 0, keys, worth);
  EXPECT_THAT(finish(1e-3), invalid("keys=0"));
  EXPECT_THAT(finish(0), invalid("ridge"));
  EXPECT_THAT(finish(-1), invalid("ridge"));
}

}  // namespace
}  // namespace qfilters
