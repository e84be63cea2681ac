#include "llama/calibrate.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/auto_scorer.h"
#include "qfilters/error.h"
#include "qfilters/filter_bank.h"
#include "qfilters/query_statistics.h"

#include "adapters/models.h"
#include "llama/filter_kind.h"

namespace qfilters::llama {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::load_tiny;
using testing::some_tokens;

class CalibrateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = load_tiny("gemma_swa");
    if (model_ == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    tokens_ = some_tokens(*model_, 250);
  }

  [[nodiscard]] FilterBank run(std::size_t chunk, std::size_t context) const {
    CalibrateOptions options;
    options.chunk = chunk;
    options.context = context;
    FilterMetadata metadata;
    metadata.dataset = "fox";
    return calibrate(model_, tokens_, options, metadata);
  }

  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
};

TEST_F(CalibrateTest, FindsOneUnitVectorPerLayerAndKvHead) {
  const FilterBank filters = run(32, 100);
  ASSERT_EQ(filters.layers(), 4U);
  for (std::size_t l = 0; l < 4; ++l) {
    ASSERT_EQ(filters.layer(l).heads, 2U);
    ASSERT_EQ(filters.layer(l).dim, 16U);
    for (std::size_t h = 0; h < 2; ++h) {
      double norm = 0;
      for (const float v : filters.layer(l).head(h)) {
        norm += static_cast<double>(v) * v;
      }
      EXPECT_NEAR(norm, 1, 1e-5);
    }
  }
  EXPECT_NO_THROW(check_filters(filters, *model_));
}

TEST_F(CalibrateTest, SaysWhoseQueriesTheyAre) {
  const FilterMetadata metadata = run(32, 100).metadata();
  EXPECT_EQ(metadata.model_id, model_->name());
  EXPECT_EQ(metadata.model_fingerprint, model_->fingerprint());
  EXPECT_EQ(metadata.query_site, "attention");
  EXPECT_EQ(metadata.dataset, "fox");
  EXPECT_EQ(metadata.n_samples, 250U) << "every token, whatever the passages";
}

TEST_F(CalibrateTest, GivesTheSameBitsAgain) {
  EXPECT_EQ(run(32, 100), run(32, 100));
}

TEST_F(CalibrateTest, PassagesAreIndependentOfEachOther) {
  const std::vector<Token> whole = tokens_;
  tokens_.resize(100);
  const FilterBank alone = run(32, 100);
  // The same passage twice has the same second moments, doubled.
  tokens_.insert(tokens_.end(), whole.begin(), whole.begin() + 100);
  const FilterBank twice = run(32, 100);
  for (std::size_t l = 0; l < 4; ++l) {
    for (std::size_t i = 0; i < alone.layer(l).values.size(); ++i) {
      EXPECT_NEAR(alone.layer(l).values[i], twice.layer(l).values[i], 1e-5);
    }
  }
}

TEST_F(CalibrateTest, ReportsProgress) {
  std::vector<std::size_t> done;
  CalibrateOptions options;
  options.chunk = 64;
  options.context = 100;
  (void)calibrate(
      model_, tokens_, options, {}, [&](std::size_t n) { done.push_back(n); });
  EXPECT_EQ(done, (std::vector<std::size_t>{64, 100, 164, 200, 250}));
}

TEST_F(CalibrateTest, NeedsTwoTokens) {
  tokens_.resize(1);
  const Error error = error_of([&] { (void)run(32, 100); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("tokens=1"));
}

TEST_F(CalibrateTest, LearnsFromASecondReading) {
  const std::vector<Token> cue = some_tokens(*model_, 3);
  CalibrateOptions options;
  options.context = 100;
  const auto learn = [&](std::size_t chunk, int threads) {
    options.chunk = chunk;
    options.threads = threads;
    return calibrate_reconstruction(model_, tokens_, cue, options, {});
  };
  const FilterBank filters = learn(32, 1);
  ASSERT_EQ(filters.layers(), 4U);
  bool some_global = false;
  for (std::size_t l = 0; l < 4; ++l) {
    ASSERT_EQ(filters.layer(l).heads, 2U);
    ASSERT_EQ(filters.layer(l).dim, auto_size(16));
    const auto& values = filters.layer(l).values;
    const bool zero = std::all_of(
        values.begin(), values.end(), [](float v) { return v == 0.0F; });
    EXPECT_EQ(zero, model_->layers()[l].window != 0) << l;
    some_global = some_global || !zero;
  }
  EXPECT_TRUE(some_global);
  EXPECT_EQ(filters.metadata().query_site, "reconstruction");
  EXPECT_EQ(filters.metadata().model_id, model_->name());
  // Passages of 100, 100 and 50: the last is too short, sinks do not count,
  // nor does an eighth at the end.
  EXPECT_EQ(filters.metadata().n_samples, 2U * (100 - 12 - 8));
  EXPECT_EQ(kind_of(filters.metadata()), FilterKind::kAuto);
  EXPECT_EQ(kind_of(run(32, 100).metadata()), FilterKind::kQFilters);
  EXPECT_NO_THROW(check_filters(filters, *model_));
  EXPECT_EQ(learn(32, 2), filters);
}

TEST_F(CalibrateTest, FiltersOfAnotherSizeSayWhatIsNeeded) {
  const std::size_t one = auto_size(16) / 2;
  const std::vector<LayerFilters> halves(
      4, LayerFilters{2, one, std::vector<float>(2 * one)});
  FilterMetadata metadata;
  metadata.query_site = "reconstruction";
  const Error error =
      error_of([&] { check_filters(FilterBank(halves, metadata), *model_); });
  EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
  EXPECT_THAT(
      error.what(), HasSubstr("layer 0: the filters have 2 heads of 34, "));
  EXPECT_THAT(error.what(), HasSubstr(" needs 2 of 68"));
}

TEST_F(CalibrateTest, DescribesQueriesBeforeRope) {
  CalibrateOptions options;
  options.context = 100;
  const auto describe = [&](std::size_t chunk, int threads) {
    options.chunk = chunk;
    options.threads = threads;
    return calibrate_expected(model_, tokens_, options, {});
  };
  const FilterBank filters = describe(32, 1);
  ASSERT_EQ(filters.layers(), 4U);
  for (std::size_t l = 0; l < 4; ++l) {
    const auto& values = filters.layer(l).values;
    EXPECT_EQ(filters.layer(l).dim, statistics_size(16, 2));
    EXPECT_EQ(
        std::ranges::all_of(values, [](float v) { return v == 0.0F; }),
        model_->layers()[l].window != 0)
        << l;
  }
  EXPECT_EQ(kind_of(filters.metadata()), FilterKind::kExpected);
  EXPECT_EQ(filters.metadata().query_site, "statistics");
  EXPECT_EQ(filters.metadata().n_samples, 250U - 3 * 8) << "without sinks";
  EXPECT_NO_THROW(check_filters(filters, *model_));
  EXPECT_EQ(describe(32, 2), filters);
}

// The same token makes the same queries in the first layer wherever it stands:
// what is left of positions would show as covariance.
TEST_F(CalibrateTest, OneTokenAllAlongHasNoSpreadWithoutRope) {
  for (const char* const name : {"llama_ok", "gemma_swa", "rope_factors"}) {
    const auto model = load_tiny(name);
    CalibrateOptions options;
    const std::vector<Token> same(120, 7);
    const FilterBank filters = calibrate_expected(model, same, options, {});
    const AttentionLayer& layer = model->layers().back();
    ASSERT_EQ(layer.window, 0U) << name;
    const auto values = filters.layer(filters.layers() - 1).head(0);
    const std::size_t dim = layer.key_dim;
    double mean = 0;
    double spread = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      mean += std::pow(values[2 * dim + i], 2);
      spread += values[3 * dim + (i + 1) * (i + 2) / 2 - 1];
    }
    EXPECT_GT(mean, 0) << name;
    EXPECT_LT(spread, 1e-4 * mean) << name;
  }
}

TEST_F(CalibrateTest, FindsHowLittleAttentionTurnsTheResidualStream) {
  for (const char* const name : {"llama_ok", "gemma_swa"}) {
    const auto model = load_tiny(name);
    CalibrateOptions options;
    options.context = 100;
    const auto measure = [&](std::size_t chunk, int threads) {
      options.chunk = chunk;
      options.threads = threads;
      return calibrate_squeeze(model, tokens_, options, {});
    };
    const FilterBank filters = measure(32, 1);
    EXPECT_EQ(kind_of(filters.metadata()), FilterKind::kSqueeze);
    EXPECT_EQ(filters.metadata().n_samples, 250U);
    EXPECT_NO_THROW(check_filters(filters, *model));
    const FilterBank parts = measure(7, 2);
    for (std::size_t l = 0; l < filters.layers(); ++l) {
      const auto& values = filters.layer(l).values;
      ASSERT_EQ(values.size(), model->layers()[l].kv_heads) << name;
      EXPECT_EQ(values.front(), values.back()) << name;
      EXPECT_GT(values[0], 0.1) << name << l;
      EXPECT_LT(values[0], 0.9999) << name << l;
      EXPECT_NEAR(values[0], parts.layer(l).values[0], 1e-4) << name << l;
    }
  }
}

TEST_F(CalibrateTest, RefusesRopeThatIsNotUnderstood) {
  const Error error = error_of(
      [&] { (void)calibrate_expected(load_tiny("yarn"), tokens_, {}, {}); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("scaling 'yarn'"));
}

TEST_F(CalibrateTest, NeedsAPassageToReadTwice) {
  tokens_.resize(63);
  const Error error = error_of([&] {
    (void)calibrate_reconstruction(model_, tokens_, tokens_, {}, {});
  });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("64"));
}

TEST_F(CalibrateTest, FiltersOfAnotherModelAreRefused) {
  const FilterBank filters = run(32, 100);
  const Error layers =
      error_of([&] { check_filters(filters, *load_tiny("llama_ok")); });
  EXPECT_EQ(layers.kind(), ErrorKind::kMismatch);
  EXPECT_THAT(layers.what(), HasSubstr("4 layers"));

  const Error identity =
      error_of([&] { check_filters(filters, *load_tiny("softcap")); });
  EXPECT_EQ(identity.kind(), ErrorKind::kMismatch);
  EXPECT_THAT(identity.what(), HasSubstr(model_->fingerprint()));

  const FilterBank heads(
      std::vector<LayerFilters>(4, {1, 16, std::vector<float>(16, 0.25F)}), {});
  EXPECT_THAT(
      error_of([&] { check_filters(heads, *model_); }).what(),
      HasSubstr("1 heads of 16"));
}

TEST_F(CalibrateTest, FiltersOfUnknownOriginFitByTheirShape) {
  const FilterBank unknown(
      std::vector<LayerFilters>(4, {2, 16, std::vector<float>(32, 0.25F)}), {});
  EXPECT_NO_THROW(check_filters(unknown, *model_));
}

}  // namespace
}  // namespace qfilters::llama
