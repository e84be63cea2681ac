#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "policies/registry.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::policies {
namespace {

using ::testing::ElementsAre;

using test::budget;
using test::error_of;
using test::IsError;

const std::vector<LayerShape> kLayers(30, LayerShape{3, 64, 64, 0});

TEST(PolicyRegistryTest, KnowsThePoliciesInDocumentedOrder) {
  std::vector<std::string_view> names;
  for (const PolicyInfo& info : all())
    names.push_back(info.name);
  EXPECT_THAT(
      names,
      ElementsAre(
          "full",
          "auto",
          "qfilters",
          "streaming",
          "knorm",
          "random",
          "keydiff",
          "qfilters-keysvd",
          "expected",
          "h2o",
          "cam",
          "tova",
          "snapkv",
          "pyramidkv",
          "squeeze",
          "chunkkv",
          "reconstruct"));
}

TEST(PolicyRegistryTest, MakesEachByName) {
  const auto directions = std::make_shared<const FilterBank>(
      std::vector<LayerFilters>{{1, 2, {1, 0}}}, FilterMetadata{});
  const auto similarities = std::make_shared<const FilterBank>(
      std::vector<LayerFilters>(kLayers.size(), {1, 1, {0.5F}}),
      FilterMetadata{});
  for (const PolicyInfo& info : all()) {
    SCOPED_TRACE(std::string(info.name));
    EXPECT_EQ(find(info.name), &info);
    const auto& filters = info.name == "squeeze" ? similarities : directions;
    const auto made = [&](const auto& bank, const auto& layers) {
      return make(info.name, budget(512, 4, 32), bank, layers);
    };
    const Policy policy = made(filters, kLayers);
    EXPECT_EQ(policy.name(), info.name);
    EXPECT_EQ(policy.bounded(), info.name != "full");
    EXPECT_EQ(
        error_of([&] { (void)made(nullptr, kLayers); }).has_value(),
        info.needs_filters);
    EXPECT_EQ(
        error_of([&] {
          (void)made(filters, std::vector<LayerShape>{});
        }).has_value(),
        info.needs_layers);
  }
  EXPECT_EQ(find("best"), nullptr);
  EXPECT_THAT(
      error_of([] { (void)make("best", {}); }),
      IsError(ErrorKind::kInvalidArgument, "'best'; known: full, auto"));
}

TEST(PolicyRegistryTest, MakesMergersByName) {
  EXPECT_EQ(make_merger("none", 0), nullptr);
  EXPECT_EQ(make_merger("cam", 5)->identity(), "cam 32 5");
  EXPECT_THAT(
      error_of([] { (void)make_merger("glue", 0); }),
      IsError(ErrorKind::kInvalidArgument, "'glue' is not one of none, cam"));
}

// The merger sees all attention; what stays is what stays without it.
TEST(PolicyRegistryTest, AnyScorerTakesAMergerOfAttention) {
  const test::Model& model = test::two_layers();
  for (const std::string name :
       {"auto", "qfilters", "streaming", "knorm", "random", "keydiff"}) {
    SCOPED_TRACE(name);
    PolicyOptions options = budget(30, 2, 5, 4);
    const auto& filters = model.filters_for(name);
    SequenceCache plain(
        model.layers, make(name, options, filters), model.options());
    options.merger = make_merger("cam", 0);
    SequenceCache cache(
        model.layers, make(name, options, filters), model.options());
    float seen = 0;
    for (const std::size_t count : {50U, 1U, 40U, 3U, 60U}) {
      model.feed(plain, {count});
      model.append(cache, count);
      for (std::size_t l = 0; l < model.layers.size(); ++l) {
        AttentionStatistics attention;
        for (std::size_t g = 0; g < cache.rows(l).shape().groups(); ++g)
          attention.rows.emplace_back(cache.rows(l).rows(g), 0.5F);
        cache.observe(l, attention);
      }
      cache.commit();
      seen += 0.5F;
      for (std::size_t l = 0; l < model.layers.size(); ++l) {
        for (std::size_t g = 0; g < cache.rows(l).shape().groups(); ++g) {
          EXPECT_TRUE(std::ranges::equal(
              cache.store(l).positions(g), plain.store(l).positions(g)));
          EXPECT_EQ(cache.store(l).scores(g).front(), seen);
        }
      }
    }
    const auto rows = test::contents_of(cache).layers;
    EXPECT_NE(rows[0][0].rows, test::contents_of(plain).layers[0][0].rows);
  }
}

// Slots are filled one by one, then a policy comes that finds rows in them.
TEST(PolicyRegistryTest, ThePlaceOfRowsChangesNoChoice) {
  const test::Model& model = test::two_layers();
  std::mt19937 random(3);
  for (const std::string name :
       {"auto", "keydiff", "h2o", "cam", "tova", "snapkv", "chunkkv"}) {
    SCOPED_TRACE(name);
    PolicyOptions options = budget(50, 0, 5);
    SequenceOptions slots = model.options();
    slots.order = RowOrder::kSlot;
    SequenceCache temporal(
        model.layers, make("random", options), model.options());
    SequenceCache shuffled(model.layers, make("random", options), slots);
    model.feed(temporal, std::vector<std::size_t>(150, 1));
    model.feed(shuffled, std::vector<std::size_t>(150, 1));
    options.budget = 40;
    options.merger = make_merger("cam", 0);
    const Policy policy = make(name, options, model.filters_for(name));
    // By position, so that both see the same.
    std::vector<float> paid(test::kModelTokens);
    for (SequenceCache* cache : {&temporal, &shuffled})
      cache->set_policy(policy);
    for (const std::size_t count : {40U, 3U, 1U}) {
      for (float& x : paid)
        x = static_cast<float>(random() % 1000) / 1000;
      for (SequenceCache* cache : {&temporal, &shuffled}) {
        model.append(*cache, count);
        for (std::size_t l = 0; l < model.layers.size(); ++l) {
          const RowsView rows = cache->rows(l);
          const AttentionNeeds needs = *cache->attention_needs(l);
          AttentionStatistics attention{needs.kind, needs.last_queries, {}};
          for (std::size_t g = 0; g < rows.shape().groups(); ++g) {
            auto& head = attention.rows.emplace_back();
            for (std::size_t r = 0; r < rows.rows(g); ++r) {
              head.push_back(
                  paid[static_cast<std::size_t>(rows.position(g, r))]);
            }
          }
          cache->observe(l, attention);
        }
        cache->commit();
      }
      EXPECT_EQ(test::in_temporal_order(shuffled), test::contents_of(temporal));
    }
  }
}

TEST(PolicyRegistryTest, AStateOfAnotherMergerIsRefusedByIt) {
  const test::Model& model = test::two_layers();
  for (const std::string name : {"auto", "h2o"}) {
    PolicyOptions options = budget(30, 2, 5);
    const auto& filters = model.filters_for(name);
    SequenceCache plain(
        model.layers, make(name, options, filters), model.options());
    options.merger = make_merger("cam", 3);
    SequenceCache merging(
        model.layers, make(name, options, filters), model.options());
    options.merger = make_merger("cam", 4);
    SequenceCache other(
        model.layers, make(name, options, filters), model.options());
    EXPECT_THAT(
        error_of([&] { plain.restore(merging.save()); }),
        IsError(
            ErrorKind::kMismatch, "the saved state has 'merger cam 32 3', "));
    EXPECT_THAT(
        error_of([&] { merging.restore(plain.save()); }),
        IsError(ErrorKind::kMismatch, "this cache has 'merger cam 32 3'"));
    EXPECT_THAT(
        error_of([&] { merging.restore(other.save()); }),
        IsError(
            ErrorKind::kMismatch,
            "has 'merger cam 32 4', this cache has 'merger cam 32 3'"));
  }
}

TEST(PyramidTest, FallsEvenlyFromTheFirstLayerToTheLast) {
  // 201 rows beyond sinks and recent, one of which each layer has anyway.
  const std::vector<LayerShape> five(5, LayerShape{1, 8, 8, 0});
  EXPECT_THAT(
      pyramid_budgets(five, 211, {4, 6}),
      ElementsAre(11 + 390, 11 + 295, 11 + 200, 11 + 105, 11 + 10));
}

TEST(PyramidTest, AddsUpToTheBudgetAndNeverRises) {
  for (const std::size_t rows : {37U, 38U, 50U, 129U, 512U, 4096U}) {
    for (const std::size_t layers : {1U, 2U, 7U, 30U}) {
      const auto budgets =
          pyramid_budgets(std::span(kLayers).first(layers), rows, {4, 32});
      EXPECT_EQ(
          std::accumulate(budgets.begin(), budgets.end(), std::size_t{0}),
          rows * layers);
      EXPECT_TRUE(std::ranges::all_of(
          budgets, [](std::size_t each) { return each > 36; }));
      // Rounding may raise a budget by a row.
      for (std::size_t l = 1; l < layers; ++l)
        EXPECT_LE(budgets[l], budgets[l - 1] + 1);
    }
  }
}

TEST(PyramidTest, CountsGlobalLayersOnly) {
  std::vector<LayerShape> mixed(4, LayerShape{1, 8, 8, 0});
  mixed[1].window = mixed[2].window = 128;
  EXPECT_THAT(
      pyramid_budgets(mixed, 101, {0, 0}), ElementsAre(196, 101, 101, 6));
}

TEST(PyramidTest, RefusesABudgetThatProtectionFills) {
  EXPECT_THAT(
      error_of([] {
        (void)pyramid_budgets(kLayers, 36, {4, 32});
      }),
      IsError(ErrorKind::kInvalidArgument, "must be below the budget (36)"));
}

TEST(PyramidTest, ThePolicyKeepsTheBudgetOnTheWhole) {
  const test::Model model(std::vector<LayerShape>(5, LayerShape{1, 8, 8, 0}));
  const Policy policy =
      make("pyramidkv", budget(60, 4, 10), nullptr, model.layers);
  EXPECT_EQ(policy.options().layer_budgets.size(), 5U);
  EXPECT_GT(policy.budget(0), policy.budget(4));
  EXPECT_THAT(
      error_of([&] {
        (void)make("pyramidkv", policy.options(), nullptr, model.layers);
      }),
      IsError(ErrorKind::kInvalidArgument, "finds the budgets"));
}

// Each layer's group by Lloyd's iteration from every choice of three starts,
// the best of all: slow, and nothing like the sums of runs.
std::vector<std::size_t> squeezed_by_hand(
    const std::vector<float>& of,
    std::size_t budget,
    std::size_t least,
    double share) {
  double best = 1e9;
  std::vector<std::size_t> group;
  double top = 0;
  for (const double a : of) {
    for (const double b : of) {
      for (const double c : of) {
        std::vector<double> means{a, b, c};
        std::vector<std::size_t> nearest(of.size());
        double spread = 0;
        for (int round = 0; round < 30; ++round) {
          std::vector<double> sum(3);
          std::vector<double> count(3);
          spread = 0;
          for (std::size_t l = 0; l < of.size(); ++l) {
            for (std::size_t m = 0; m < 3; ++m) {
              if (std::abs(of[l] - means[m]) <
                  std::abs(of[l] - means[nearest[l]]))
                nearest[l] = m;
            }
            spread += std::pow(of[l] - means[nearest[l]], 2);
            sum[nearest[l]] += of[l];
            count[nearest[l]] += 1;
          }
          for (std::size_t m = 0; m < 3; ++m) {
            if (count[m] > 0) means[m] = sum[m] / count[m];
          }
        }
        if (spread >= best - 1e-12) continue;
        best = spread;
        group = nearest;
        top = *std::ranges::max_element(of);
      }
    }
  }
  std::size_t last = 0;
  for (std::size_t l = 0; l < of.size(); ++l) {
    if (of[l] == float(top)) last = group[l];
  }
  std::vector<std::size_t> budgets(of.size());
  const auto less =
      std::max(least, std::size_t(std::llround(share * double(budget))));
  const auto few = std::size_t(std::ranges::count(group, last));
  std::size_t left = budget * of.size() - few * less;
  std::size_t others = of.size() - few;
  for (std::size_t l = 0; l < of.size(); ++l) {
    if (group[l] == last) {
      budgets[l] = less;
    } else {  // as even as whole rows are, more for the first
      budgets[l] = (left + others - 1) / others;
      left -= budgets[l];
      --others;
    }
  }
  return budgets;
}

TEST(SqueezeTest, LayersThatAttentionHardlyTurnsKeepAShareOfTheBudget) {
  const std::vector<LayerShape> six(6, LayerShape{1, 8, 8, 0});
  const std::vector<float> similarities{0.5F, 0.9F, 0.52F, 0.91F, 0.7F, 0.89F};
  // 3 * 65 rows are freed for 3 layers.
  EXPECT_THAT(
      squeeze_budgets(six, similarities, 100, {4, 0}),
      ElementsAre(165, 35, 165, 35, 165, 35));
  // Sinks and recent rows leave no room for so few.
  EXPECT_THAT(
      squeeze_budgets(six, similarities, 100, {50, 29}, 0.1),
      ElementsAre(120, 80, 120, 80, 120, 80));
}

TEST(SqueezeTest, GroupsAreThoseOfKMeans) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> any(0.2F, 1.0F);
  for (int round = 0; round < 40; ++round) {
    const std::size_t count = 3 + static_cast<std::size_t>(round) % 9;
    std::vector<float> of(count);
    for (float& similarity : of)
      similarity = any(random);
    const std::vector<LayerShape> layers(count, LayerShape{1, 8, 8, 0});
    const auto got = squeeze_budgets(layers, of, 129, {4, 8}, 0.3);
    EXPECT_EQ(got, squeezed_by_hand(of, 129, 13, 0.3));
    EXPECT_EQ(
        std::accumulate(got.begin(), got.end(), std::size_t{0}), 129 * count);
  }
}

TEST(SqueezeTest, CountsGlobalLayersOnlyAndKeepsEqualOnesTogether) {
  std::vector<LayerShape> layers(4, LayerShape{1, 8, 8, 0});
  EXPECT_THAT(
      squeeze_budgets(layers, std::vector<float>(4, 0.7F), 50, {4, 0}),
      ElementsAre(50, 50, 50, 50));
  EXPECT_THAT(
      squeeze_budgets(layers, std::vector{0.7F, 0.9F, 0.9F, 0.9F}, 20, {0, 0}),
      ElementsAre(20 + 3 * 13, 7, 7, 7));
  layers[1].window = 128;
  EXPECT_THAT(
      squeeze_budgets(layers, std::vector{0.7F, 1.0F, 0.9F, 0.9F}, 20, {0, 0}),
      ElementsAre(46, 20, 7, 7));
}

TEST(SqueezeTest, RefusesWhatDoesNotFit) {
  const std::vector<LayerShape> layers(2, LayerShape{1, 8, 8, 0});
  const std::vector<float> two{0.5F, 0.6F};
  const auto refused =
      [&](const std::vector<float>& of, std::size_t budget, double share) {
        return error_of([&] {
          (void)squeeze_budgets(layers, of, budget, {4, 6}, share);
        });
      };
  EXPECT_FALSE(refused(two, 11, 0.3).has_value());
  const auto error = IsError(ErrorKind::kInvalidArgument, "squeeze budgets");
  EXPECT_THAT(refused(two, 10, 0.3), error);
  EXPECT_THAT(refused(two, 20, 1.1), error);
  EXPECT_THAT(refused({0.5F}, 20, 0.3), error);
  EXPECT_THAT(refused({0.5F, test::kNaN}, 20, 0.3), error);
}

TEST(SqueezeTest, ThePolicyKeepsTheNewestRowsWithinItsBudgets) {
  const test::Model model(std::vector<LayerShape>(2, LayerShape{1, 8, 8, 0}));
  const auto filters = std::make_shared<const FilterBank>(
      std::vector<LayerFilters>{{1, 1, {0.9F}}, {1, 1, {0.5F}}},
      FilterMetadata{});
  const Policy policy =
      make("squeeze", budget(20, 2, 0), filters, model.layers);
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {60});
  EXPECT_THAT(
      cache.store(0).positions(0), ElementsAre(0, 1, 55, 56, 57, 58, 59));
  EXPECT_EQ(cache.store(1).rows(0), 33U);
  const std::vector<LayerShape> three(3, model.layers[0]);
  EXPECT_THAT(
      error_of(
          [&] { (void)make("squeeze", budget(20, 2, 0), filters, three); }),
      IsError(
          ErrorKind::kMismatch, "2 layers in the filters, the model has 3"));
}

}  // namespace
}  // namespace qfilters::policies
