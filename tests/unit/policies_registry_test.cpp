#include <algorithm>
#include <memory>
#include <numeric>
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
          "tova",
          "snapkv",
          "pyramidkv",
          "chunkkv"));
}

TEST(PolicyRegistryTest, MakesEachByName) {
  const auto filters = std::make_shared<const FilterBank>(
      std::vector<LayerFilters>{{1, 2, {1, 0}}}, FilterMetadata{});
  for (const PolicyInfo& info : all()) {
    SCOPED_TRACE(std::string(info.name));
    EXPECT_EQ(find(info.name), &info);
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

}  // namespace
}  // namespace qfilters::policies
