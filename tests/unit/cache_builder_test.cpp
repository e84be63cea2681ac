#include "qfilters/cache_builder.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kTokens = 40;

// Attention, none, attention: the layers differ.
ModelShape some_model() {
  return {
      {ModelShape::Attention{2, 16}, std::nullopt, ModelShape::Attention{1, 8}},
      "feedbeef"};
}

LayerFilters filters_of(std::size_t heads, std::size_t dim) {
  const std::size_t size = heads * dim;
  return {heads, dim, test::random_filter(size, size)};
}

FilterBank some_filters(std::string fingerprint = "feedbeef") {
  FilterMetadata metadata;
  metadata.model_fingerprint = std::move(fingerprint);
  return {{filters_of(2, 16), filters_of(1, 8)}, metadata};
}

void feed(QFiltersKVCache& cache, std::size_t heads, std::size_t dim) {
  const auto keys =
      test::random_halves(7, DType::kFloat16, 1, heads, kTokens, dim);
  cache.update_and_fetch(keys.view(), keys.view());
}

std::string refusal(const std::function<void()>& action, ErrorKind kind) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(CacheBuilderTest, GivesEachAttentionLayerACacheWithItsFilters) {
  const FilterBank filters = some_filters();
  Config config;
  config.qfilters_budget = 12;
  auto caches = CacheBuilder::for_model(some_model(), config, &filters);
  ASSERT_EQ(caches.size(), 3U);
  ASSERT_TRUE(caches[0] && caches[2]);
  EXPECT_FALSE(caches[1]);
  feed(*caches[0], 2, 16);
  feed(*caches[2], 1, 8);
  for (const auto& [cache, layer] : {std::pair(0, 0), std::pair(2, 1)}) {
    EXPECT_EQ(caches[cache]->tokens_kept(), 12U);
    const auto states = caches[cache]->states();
    for (std::size_t h = 0; h < states.size(); ++h) {
      const auto own = filters.layer(layer).head(h);
      EXPECT_EQ(
          states[h].filter_dir, std::vector<float>(own.begin(), own.end()));
    }
  }
}

TEST(CacheBuilderTest, CachesAreIndependent) {
  auto caches = CacheBuilder::for_model(some_model());
  feed(*caches[0], 2, 16);
  EXPECT_EQ(caches[0]->offset(), kTokens);
  EXPECT_EQ(caches[2]->offset(), 0U);
}

TEST(CacheBuilderTest, FallsBackToKeysWithoutFilters) {
  Config config;
  config.qfilters_budget = 12;
  config.qfilters_calib_tokens = 41;
  auto caches = CacheBuilder::for_model(some_model(), config);
  feed(*caches[0], 2, 16);
  EXPECT_EQ(caches[0]->tokens_kept(), kTokens) << "no direction yet";
  feed(*caches[0], 2, 16);
  EXPECT_EQ(caches[0]->tokens_kept(), 12U);
}

TEST(CacheBuilderTest, RefusesFiltersOfAnotherModel) {
  const auto make = [](const ModelShape& model, const FilterBank& filters) {
    return [&model, &filters] {
      static_cast<void>(CacheBuilder::for_model(model, {}, &filters));
    };
  };
  const FilterBank stranger = some_filters("0badcafe");
  const ModelShape model = some_model();
  EXPECT_THAT(
      refusal(make(model, stranger), ErrorKind::kMismatch),
      AllOf(HasSubstr("feedbeef"), HasSubstr("0badcafe")));
  const FilterBank short_bank({filters_of(2, 16)}, {});
  EXPECT_THAT(
      refusal(make(model, short_bank), ErrorKind::kMismatch),
      HasSubstr("1 layers of filters for 2 attention layers"));
  const FilterBank wide({filters_of(2, 16), filters_of(1, 9)}, {});
  EXPECT_THAT(
      refusal(make(model, wide), ErrorKind::kMismatch),
      AllOf(HasSubstr("layer 2"), HasSubstr("[1, 8]"), HasSubstr("[1, 9]")));
  // An unknown model cannot be told apart but by its shapes.
  EXPECT_NO_THROW(make(model, some_filters(""))());
  ModelShape anonymous = some_model();
  anonymous.fingerprint.clear();
  EXPECT_NO_THROW(make(anonymous, stranger)());
}

TEST(CacheBuilderTest, RefusesWhatIsNoModelAndABadConfig) {
  const auto make = [](const ModelShape& model, const Config& config = {}) {
    return [model, config] {
      static_cast<void>(CacheBuilder::for_model(model, config));
    };
  };
  EXPECT_THAT(
      refusal(make({}), ErrorKind::kInvalidArgument),
      HasSubstr("none of 0 layers"));
  EXPECT_THAT(
      refusal(
          make({{std::nullopt, std::nullopt}, ""}),
          ErrorKind::kInvalidArgument),
      HasSubstr("none of 2 layers"));
  EXPECT_THAT(
      refusal(
          make({{ModelShape::Attention{0, 8}}, ""}),
          ErrorKind::kInvalidArgument),
      HasSubstr("[0, 8]"));
  Config config;
  config.qfilters_sign = 2;
  EXPECT_THAT(
      refusal(make(some_model(), config), ErrorKind::kInvalidArgument),
      HasSubstr("sign"));
}

}  // namespace
}  // namespace qfilters
