#include "qfilters/auto_scorer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/isa.h"
#include "qfilters/sequence_cache.h"

#include "unit/rescore_fixture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::error_of;
using test::IsError;
using test::keydiff_of;
using test::keys_of;
using test::Model;

using Keys = std::vector<std::vector<float>>;

double quadratic(const std::vector<float>& key, std::span<const float> c) {
  const std::size_t dim = key.size();
  double sum = c[2 * dim + 1];
  double squares = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    const double k = key[d];
    sum += c[d] * k + c[dim + d] * k * k;
    squares += k * k;
  }
  return sum + c[2 * dim] * std::sqrt(squares);
}

double deviation_of(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  double mean = 0;
  double square = 0;
  for (const double value : values) {
    mean += value / count;
    square += value * value / count;
  }
  return std::sqrt(std::max(square - mean * mean, 0.0));
}

double either(double facts, double fluency) {
  return (facts + fluency + std::hypot(facts - fluency, 7)) / 2;
}

// What a standard deviation of difference counts beside facts that spread so.
double weight_beside(double spread) {
  return 1.75 * std::sqrt(std::max(1.2 * 1.2 - spread * spread, 0.0));
}

// By the definition, one row at a time, in any order of rows.
std::vector<double> auto_of(
    const Keys& keys,
    const std::vector<std::int32_t>& positions,
    std::span<const float> filter) {
  const std::size_t size = filter.size() / 2;
  const std::vector<double> differences = keydiff_of(keys);
  double mean = 0;
  std::vector<double> facts;
  for (std::size_t r = 0; r < keys.size(); ++r) {
    mean += differences[r] / static_cast<double>(keys.size());
    facts.push_back(quadratic(keys[r], filter.first(size)));
  }
  const double deviation = deviation_of(differences);
  const double weight = weight_beside(deviation_of(facts));
  for (std::size_t r = 0; r < keys.size() && deviation > 1e-6; ++r)
    facts[r] += weight * (differences[r] - mean) / deviation;
  std::vector<double> scores;
  for (std::size_t r = 0; r < keys.size(); ++r) {
    double fact = facts[r];
    for (std::size_t other = 0; other < keys.size(); ++other) {
      if (std::abs(positions[other] - positions[r]) == 1)
        fact = std::max(fact, facts[other] - 1);
    }
    scores.push_back(either(fact, quadratic(keys[r], filter.subspan(size))));
  }
  return scores;
}

std::vector<std::int32_t> positions_of(
    const RowsView& rows, std::size_t group) {
  std::vector<std::int32_t> out;
  for (std::size_t r = 0; r < rows.rows(group); ++r)
    out.push_back(rows.position(group, r));
  return out;
}

// What a cache chooses by: the scores of entry, rescored.
std::vector<float> chosen_by(
    const Scorer& scorer,
    std::size_t layer,
    const RowsView& rows,
    std::size_t group) {
  const std::size_t heads = rows.shape().kv_heads;
  const RescoreInput in{layer, group / heads, group % heads, rows};
  std::vector<float> scores(rows.rows(group));
  score_rows(scorer, in, scores);
  scorer.rescore(in, scores);
  return scores;
}

using AutoScorerTest = test::RescoreTest;

// The filters with a share of their facts.
std::shared_ptr<const FilterBank> with_less_facts(
    const FilterBank& filters, float share) {
  std::vector<LayerFilters> layers;
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    LayerFilters layer = filters.layer(l);
    for (std::size_t h = 0; h < layer.heads; ++h) {
      for (std::size_t i = 0; i < layer.dim / 2; ++i)
        layer.values[h * layer.dim + i] *= share;
    }
    layers.push_back(std::move(layer));
  }
  return std::make_shared<const FilterBank>(layers, FilterMetadata{});
}

// Filters whose facts tell keys apart, and such as need differences.
std::vector<std::shared_ptr<const FilterBank>> with_spreads(
    const Model& model) {
  return {model.of_auto, with_less_facts(*model.of_auto, 0.02F)};
}

TEST_F(AutoScorerTest, ScoresByFactsAndFluency) {
  std::size_t told_apart = 0;
  std::size_t alike = 0;
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    for (const auto& filters : with_spreads(*model_)) {
      const auto scorer = make_auto_scorer(filters);
      const auto got = chosen_by(*scorer, 0, rows, group);
      const auto keys = keys_of(rows, group);
      const auto filter = filters->layer(0).head(group % 2);
      std::vector<double> facts;
      for (const auto& key : keys)
        facts.push_back(quadratic(key, filter.first(filter.size() / 2)));
      ++(weight_beside(deviation_of(facts)) > 0 ? alike : told_apart);
      const auto want = auto_of(keys, positions_of(rows, group), filter);
      for (std::size_t r = 0; r < want.size(); ++r)
        ASSERT_NEAR(got[r], want[r], 1e-3 * (1 + std::abs(want[r]))) << r;
    }
  });
  EXPECT_GT(alike, 50U);
  EXPECT_GT(told_apart, 50U);
}

// Rows that were overwritten in their slots lie in any order.
TEST_F(AutoScorerTest, KnowsNeighboursByPosition) {
  const Model& model = test::two_layers();
  SequenceOptions options = model.options();
  options.order = RowOrder::kSlot;
  SequenceCache cache(
      model.layers,
      test::qfilters_policy(model, test::budget(40, 2, 5)),
      options);
  model.feed(cache, std::vector<std::size_t>(80, 1));
  model.append(cache, 7);
  bool mixed = false;
  for (const auto& filters : with_spreads(model)) {
    const auto scorer = make_auto_scorer(filters);
    for (std::size_t l = 0; l < 2; ++l) {
      const RowsView rows = cache.rows(l);
      const std::size_t heads = model.layers[l].kv_heads;
      for (std::size_t g = 0; g < rows.shape().groups(); ++g) {
        const auto positions = positions_of(rows, g);
        mixed = mixed || !std::ranges::is_sorted(positions);
        const auto got = chosen_by(*scorer, l, rows, g);
        const auto want = auto_of(
            keys_of(rows, g), positions, filters->layer(l).head(g % heads));
        for (std::size_t r = 0; r < want.size(); ++r)
          ASSERT_NEAR(got[r], want[r], 1e-3 * (1 + std::abs(want[r]))) << r;
      }
    }
  }
  EXPECT_TRUE(mixed);
}

TEST_F(AutoScorerTest, HasTheSameBitsOnEveryInstructionSet) {
  const Model model({{2, 80, 8, 0}}, 2);
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {150});
  model.append(cache, 23);
  const std::string before = active_isa();
  for (const auto& filters : with_spreads(model)) {
    const auto scorer = make_auto_scorer(filters);
    const auto want = bits_of(chosen_by(*scorer, 0, cache.rows(0), 3));
    for (const auto& isa : runnable_isas()) {
      set_isa(isa);
      EXPECT_EQ(bits_of(chosen_by(*scorer, 0, cache.rows(0), 3)), want) << isa;
    }
    set_isa(before);
  }
}

TEST_F(AutoScorerTest, LeavesDifferencesOutWhereThereAreNone) {
  Model model({{1, 16, 8, 0}});
  for (std::size_t t = 1; t < 9; ++t) {
    std::ranges::copy(
        model.keys[0].row(0, 0, 0), model.keys[0].row(0, 0, t).begin());
  }
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 9);
  const auto key = keys_of(cache.rows(0), 0)[0];
  const auto filter = model.of_auto->layer(0).head(0);
  const std::size_t size = filter.size() / 2;
  const double want = either(
      quadratic(key, filter.first(size)), quadratic(key, filter.subspan(size)));
  const auto scorer = make_auto_scorer(model.of_auto);
  for (const float got : chosen_by(*scorer, 0, cache.rows(0), 0))
    EXPECT_NEAR(got, want, 1e-3 * (1 + std::abs(want)));
}

// Others are scored as if the row were not there.
void expect_first_and_spoiling_none(
    const Model& model, std::shared_ptr<const FilterBank> filters) {
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 9);
  const auto filter = filters->layer(0).head(0);
  auto got = chosen_by(*make_auto_scorer(filters), 0, cache.rows(0), 0);
  EXPECT_TRUE(std::isnan(got[4]));
  got.erase(got.begin() + 4);
  auto keys = keys_of(cache.rows(0), 0);
  keys.erase(keys.begin() + 4);
  const auto want = auto_of(keys, {0, 1, 2, 3, 5, 6, 7, 8}, filter);
  for (std::size_t r = 0; r < want.size(); ++r)
    EXPECT_NEAR(got[r], want[r], 1e-3 * (1 + std::abs(want[r]))) << r;
}

TEST_F(AutoScorerTest, AKeyThatIsNotFiniteGoesFirstAndSpoilsNoOther) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const bool half = dtype == DType::kFloat16;
    const std::uint16_t infinity = half ? 0x7C00 : 0x7F80;
    const std::uint16_t nan = half ? 0x7E00 : 0x7FC0;
    const std::uint16_t minus = infinity | 0x8000U;
    std::vector<std::uint16_t> odd{infinity, minus, nan};
    if (!half) odd.push_back(0x7F00);  // its square is infinite
    for (const std::uint16_t element : odd) {
      SCOPED_TRACE(element);
      Model model({{1, 16, 8, 0}}, 1, dtype);
      std::ranges::fill(model.keys[0].row(0, 0, 4).first(3), element);
      for (const auto& filters : with_spreads(model))
        expect_first_and_spoiling_none(model, filters);
    }
  }
}

// Facts far below fluency, and both beyond float32.
TEST_F(AutoScorerTest, TakesTheLargerOfTwoThatAreFarApart) {
  Model model({{1, 1, 8, 0}});
  std::ranges::fill(model.keys[0].row(0, 0, 0), 0x4400);  // 4
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.append(cache, 1);
  const auto score_of = [&](std::vector<float> filter) {
    const auto scorer = make_auto_scorer(std::make_shared<const FilterBank>(
        std::vector<LayerFilters>{{1, 8, std::move(filter)}},
        FilterMetadata{}));
    return chosen_by(*scorer, 0, cache.rows(0), 0)[0];
  };
  for (const float facts : {-3e38F, -1e30F, -1e17F, -1e9F}) {
    EXPECT_FLOAT_EQ(score_of({0, facts, facts, facts, 0, 0, 0, -30}), -30)
        << facts;
  }
  EXPECT_EQ(
      score_of({0, 3e38F, 3e38F, 3e38F, 0, 3e38F, 3e38F, 3e38F}),
      std::numeric_limits<float>::infinity());
}

TEST_F(AutoScorerTest, ScoresWithItsOwnKindOfFiltersOnly) {
  const Model& model = test::two_layers();
  const auto scorer = make_auto_scorer(model.of_auto);
  EXPECT_EQ(scorer->name(), "auto");
  EXPECT_FALSE(scorer->frozen());
  EXPECT_EQ(scorer->attention(), std::nullopt);
  EXPECT_NE(scorer->identity(), make_auto_scorer(model.filters)->identity());
  scorer->check_layer(1, 3, 17);
  EXPECT_THAT(
      error_of([&] { scorer->check_layer(1, 3, 16); }),
      IsError(ErrorKind::kMismatch, "needs filters [3, 68]"));
  EXPECT_THAT(
      error_of([&] { scorer->check_layer(2, 3, 17); }),
      IsError(ErrorKind::kMismatch, "none (2 layers)"));
  EXPECT_THAT(
      error_of([] { static_cast<void>(make_auto_scorer(nullptr)); }),
      IsError(ErrorKind::kInvalidArgument, "calibrate"));
}

// Facts stay with a row; what depends on other rows is found anew.
TEST_F(AutoScorerTest, GivesRowsTheirFactsWhenTheyEnter) {
  const Model& model = test::two_layers();
  const auto filter = model.of_auto->layer(1).head(2);
  std::vector<float> want(6);
  const TensorView keys = model.keys[1].slice(0, 6);
  score_quadratic(keys, 1, 2, filter.first(filter.size() / 2), want);
  std::vector<float> got(6);
  make_auto_scorer(model.of_auto)->score({1, 1, 2, keys, 0}, got);
  EXPECT_EQ(bits_of(got), bits_of(want));
}

}  // namespace
}  // namespace qfilters
