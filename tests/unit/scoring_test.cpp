#include "qfilters/scoring.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/filter_bank.h"
#include "qfilters/isa.h"
#include "qfilters/key_regression.h"

#include "unit/rescore_fixture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;

using test::bits_of;
using test::canonical_score;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::random_filter;
using test::random_halves;

std::shared_ptr<const FilterBank> bank(
    std::size_t layers, std::size_t heads, std::size_t dim) {
  std::vector<LayerFilters> out;
  for (std::size_t l = 0; l < layers; ++l) {
    out.push_back({heads, dim, random_filter(l + 1, heads * dim)});
  }
  return std::make_shared<const FilterBank>(out, FilterMetadata{});
}

// Scores of one head, asked for in chunks of `chunk` tokens.
std::vector<float> scores_of(
    const Scorer& scorer,
    const HalfTensor& keys,
    std::size_t chunk,
    std::size_t layer = 0,
    std::size_t batch = 0,
    std::size_t head = 0) {
  std::vector<float> out(keys.view().tokens);
  std::size_t first = 0;
  for (const std::size_t count : test::chunks(out.size(), chunk)) {
    scorer.score(
        {layer,
         batch,
         head,
         keys.slice(first, count),
         static_cast<std::int32_t>(first)},
        std::span(out).subspan(first, count));
    first += count;
  }
  return out;
}

TEST(ScoreProjectionTest, IsTheDotProductTimesTheSign) {
  HalfTensor keys(DType::kFloat16, 1, 1, 2, 3);
  const std::vector<float> values = {1, 2, 3, -1, 0.5F, 4};
  std::transform(values.begin(), values.end(), keys.data().begin(), to_float16);
  const std::vector<float> filter = {2, -1, 0.25F};
  std::vector<float> out(2);
  score_projection(keys.view(), 0, 0, filter, 1.0F, out);
  EXPECT_THAT(out, ElementsAre(0.75F, -1.5F));
  score_projection(keys.view(), 0, 0, filter, -1.0F, out);
  EXPECT_THAT(out, ElementsAre(-0.75F, 1.5F));
}

TEST(ScoreProjectionTest, HasTheBitsOfTheCanonicalOrder) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t dim :
         {1U, 2U, 15U, 16U, 17U, 31U, 33U, 64U, 80U, 96U, 128U, 256U}) {
      SCOPED_TRACE(dim);
      const HalfTensor keys = random_halves(dim, dtype, 2, 3, 9, dim, 5);
      const auto filter = random_filter(dim + 1, dim);
      for (std::size_t b = 0; b < 2; ++b) {
        for (std::size_t h = 0; h < 3; ++h) {
          std::vector<float> out(9);
          score_projection(keys.view(), b, h, filter, -1.0F, out);
          std::vector<float> want;
          for (std::size_t t = 0; t < 9; ++t) {
            want.push_back(
                canonical_score(dtype, keys.row(b, h, t), filter, -1.0F));
          }
          EXPECT_EQ(bits_of(out), bits_of(want));
        }
      }
    }
  }
}

TEST(ScoreProjectionTest, GivesARowTheSameBitsInEveryBatch) {
  const HalfTensor keys = random_halves(3, DType::kFloat16, 1, 1, 50, 80);
  const auto scorer = make_qfilters_scorer(bank(1, 1, 80));
  const auto whole = bits_of(scores_of(*scorer, keys, 50));
  for (const std::size_t chunk : {1U, 7U, 16U, 49U}) {
    EXPECT_EQ(bits_of(scores_of(*scorer, keys, chunk)), whole);
  }
}

TEST(ScoreProjectionTest, GivesNaNForNonFiniteKeysOnlyWhereItMust) {
  HalfTensor keys(DType::kFloat16, 1, 1, 3, 20);
  keys.row(0, 0, 0)[19] = 0x7C00;  // inf * 1
  keys.row(0, 0, 1)[18] = 0x7C00;  // inf * 0
  keys.row(0, 0, 2)[0] = 0x7E00;   // NaN
  std::vector<float> filter(20, 0.0F);
  filter[19] = 1.0F;
  std::vector<float> out(3);
  score_projection(keys.view(), 0, 0, filter, -1.0F, out);
  EXPECT_EQ(out[0], -test::kInfinity);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_TRUE(std::isnan(out[2]));
}

// By its definition, each operation rounded, in the canonical order.
float quadratic_score(
    DType dtype,
    std::span<const std::uint16_t> key,
    std::span<const float> c,
    float norm) {
  float sums[16] = {};
  for (std::size_t d = 0; d < key.size(); ++d) {
    const float k =
        dtype == DType::kFloat16 ? from_float16(key[d]) : from_bfloat16(key[d]);
    const float square = c[key.size() + d] * k;
    const float factor = c[d] + square;
    const float term = k * factor;
    sums[d % 16] += term;
  }
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j)
      sums[j] += sums[j + half];
  }
  const float of_norm = c[2 * key.size()] * norm;
  const float sum = sums[0] + of_norm;
  return sum + c[2 * key.size() + 1];
}

TEST(ScoreQuadraticTest, HasTheBitsOfTheCanonicalOrderOnEveryIsa) {
  for (const std::string_view isa : runnable_isas()) {
    SCOPED_TRACE(isa);
    set_isa(isa);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const std::size_t dim : {1U, 7U, 16U, 17U, 64U, 80U, 128U, 256U}) {
        SCOPED_TRACE(dim);
        const HalfTensor keys = random_halves(dim, dtype, 2, 3, 9, dim, 5);
        const auto coefficients = random_filter(dim + 1, quadratic_size(dim));
        std::vector<float> out(9);
        std::vector<float> norms(9);
        score_quadratic(keys.view(), 1, 2, coefficients, out);
        key_norms(keys.view(), 1, 2, norms);
        std::vector<float> want;
        for (std::size_t t = 0; t < 9; ++t) {
          want.push_back(quadratic_score(
              dtype, keys.row(1, 2, t), coefficients, norms[t]));
        }
        EXPECT_EQ(bits_of(out), bits_of(want));
      }
    }
  }
  set_isa("auto");
}

using ScoreQuadraticRowsTest = test::RescoreTest;

TEST_F(ScoreQuadraticRowsTest, HasTheBitsOfRowByRow) {
  for_each_cache([&](const RowsView& rows, std::size_t group) {
    const std::size_t dim = rows.shape().key_dim;
    const auto coefficients = random_filter(dim, quadratic_size(dim));
    std::vector<float> got(rows.rows(group));
    score_quadratic(rows, group, coefficients, got);
    std::vector<float> want(got.size());
    std::vector<std::uint16_t> key(dim);
    for (std::size_t r = 0; r < want.size(); ++r) {
      rows.read_key(group, r, key.data());
      score_quadratic(
          TensorView::dense(key.data(), rows.shape().dtype, 1, 1, 1, dim),
          0,
          0,
          coefficients,
          std::span(want).subspan(r, 1));
    }
    ASSERT_EQ(bits_of(got), bits_of(want));
    EXPECT_THAT(
        error_of([&] {
          score_quadratic(rows, group, coefficients, std::span(got).subspan(1));
        }),
        IsError(ErrorKind::kShape, "score: room for"));
    EXPECT_THAT(
        error_of([&] {
          score_quadratic(rows, group, std::span(coefficients).subspan(1), got);
        }),
        IsError(ErrorKind::kShape, "are needed"));
  });
}

TEST(ScoreQuadraticTest, RefusesOtherCoefficients) {
  const HalfTensor keys(DType::kFloat16, 1, 1, 4, 8);
  std::vector<float> out(4);
  EXPECT_THAT(
      error_of([&] {
        score_quadratic(keys.view(), 0, 0, std::vector<float>(8), out);
      }),
      IsError(ErrorKind::kShape, "18 are needed"));
  EXPECT_THAT(
      error_of([&] {
        score_quadratic(
            keys.view(), 0, 0, std::vector<float>(18), std::span(out).first(3));
      }),
      IsError(ErrorKind::kShape, "scores=3"));
}

TEST(ScoreProjectionTest, RejectsWhatDoesNotFit) {
  const HalfTensor keys(DType::kFloat16, 2, 3, 4, 8);
  const std::vector<float> filter(8);
  std::vector<float> out(4);
  const auto score = [](const TensorView& view,
                        std::size_t b,
                        std::size_t h,
                        std::span<const float> f,
                        std::span<float> to) {
    return error_of([&] { score_projection(view, b, h, f, 1.0F, to); });
  };
  const auto is_shape = [](const char* part) {
    return IsError(ErrorKind::kShape, part);
  };
  EXPECT_EQ(score(keys.view(), 1, 2, filter, out), std::nullopt);
  EXPECT_THAT(score(keys.view(), 2, 0, filter, out), is_shape("batch=2"));
  EXPECT_THAT(score(keys.view(), 0, 3, filter, out), is_shape("head=3"));
  EXPECT_THAT(
      score(keys.view(), 0, 0, std::span(filter).first(7), out),
      is_shape("filter of 7 for keys of 8"));
  EXPECT_THAT(
      score(keys.view(), 0, 0, filter, std::span(out).first(3)),
      is_shape("scores=3"));
  TensorView wide = keys.view();
  wide.dtype = DType::kFloat32;
  EXPECT_THAT(score(wide, 0, 0, filter, out), is_shape("float32"));
}

TEST(KeyNormsTest, AreTheRootsOfSquaresInTheCanonicalOrder) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::size_t dim : {1U, 17U, 64U, 80U}) {
      const HalfTensor keys = random_halves(dim, dtype, 1, 2, 6, dim, 1);
      std::vector<float> out(6);
      key_norms(keys.view(), 0, 1, out);
      for (std::size_t t = 0; t < 6; ++t) {
        std::vector<float> key;
        for (const auto x : keys.row(0, 1, t)) {
          key.push_back(test::decode(dtype, x));
        }
        EXPECT_EQ(
            out[t],
            std::sqrt(canonical_score(dtype, keys.row(0, 1, t), key, 1.0F)));
      }
    }
  }
}

TEST(KeyNormsTest, RejectWhatDoesNotFit) {
  const HalfTensor keys(DType::kFloat16, 1, 1, 4, 8);
  std::vector<float> out(3);
  EXPECT_THAT(
      error_of([&] { key_norms(keys.view(), 0, 0, out); }),
      IsError(ErrorKind::kShape, "key norms: "));
}

TEST(QFiltersScorerTest, UsesTheFilterOfLayerAndHead) {
  const auto filters = bank(2, 3, 16);
  const auto scorer = make_qfilters_scorer(filters, -1);
  EXPECT_EQ(scorer->name(), "qfilters");
  const HalfTensor keys = random_halves(5, DType::kBFloat16, 2, 3, 4, 16);
  for (std::size_t l = 0; l < 2; ++l) {
    for (std::size_t h = 0; h < 3; ++h) {
      std::vector<float> want(4);
      score_projection(
          keys.view(), 1, h, filters->layer(l).head(h), -1.0F, want);
      EXPECT_EQ(scores_of(*scorer, keys, 4, l, 1, h), want);
    }
  }
}

TEST(QFiltersScorerTest, RefusesLayersOfAnotherModel) {
  const auto scorer = make_qfilters_scorer(bank(2, 3, 16));
  const auto check = [&](std::size_t l, std::size_t heads, std::size_t dim) {
    return error_of([&] { scorer->check_layer(l, heads, dim); });
  };
  EXPECT_EQ(check(1, 3, 16), std::nullopt);
  EXPECT_THAT(
      check(0, 4, 16),
      IsError(ErrorKind::kMismatch, "the filters have [3, 16]"));
  EXPECT_THAT(check(0, 3, 8), IsError(ErrorKind::kMismatch, "[3, 8]"));
  EXPECT_THAT(check(2, 3, 16), IsError(ErrorKind::kMismatch, "2 layers"));
}

TEST(QFiltersScorerTest, RejectsMissingFiltersAndBadSigns) {
  EXPECT_THAT(
      error_of([] { static_cast<void>(make_qfilters_scorer(nullptr)); }),
      IsError(ErrorKind::kInvalidArgument, "no filters"));
  for (const int sign : {0, 2, -2}) {
    EXPECT_THAT(
        error_of([&] {
          static_cast<void>(make_qfilters_scorer(bank(1, 1, 4), sign));
        }),
        IsError(ErrorKind::kInvalidArgument, "sign"));
  }
}

TEST(StreamingScorerTest, PrefersNewerRows) {
  const auto scorer = make_streaming_scorer();
  EXPECT_EQ(scorer->name(), "streaming");
  const HalfTensor keys(DType::kFloat16, 1, 1, 5, 4);
  EXPECT_THAT(scores_of(*scorer, keys, 2), ElementsAre(0, 1, 2, 3, 4));
}

TEST(StreamingScorerTest, NeverPrefersAnOlderRowAtHugePositions) {
  const auto scorer = make_streaming_scorer();
  const HalfTensor keys(DType::kFloat16, 1, 1, 64, 1);
  std::vector<float> out(64);
  for (const std::int32_t first : {(1 << 24) - 32, (1 << 30) + 1}) {
    scorer->score({0, 0, 0, keys.view(), first}, out);
    EXPECT_TRUE(std::is_sorted(out.begin(), out.end()));
  }
}

TEST(KNormScorerTest, PrefersKeysOfSmallNorm) {
  const auto scorer = make_knorm_scorer();
  EXPECT_EQ(scorer->name(), "knorm");
  HalfTensor keys(DType::kFloat16, 1, 1, 3, 2);
  keys.row(0, 0, 0)[0] = to_float16(3.0F);
  keys.row(0, 0, 0)[1] = to_float16(-4.0F);
  keys.row(0, 0, 2)[1] = to_float16(1.0F);
  EXPECT_THAT(scores_of(*scorer, keys, 3), ElementsAre(-5, 0, -1));
}

TEST(RandomScorerTest, IsUniformAndIndependentOfChunking) {
  const auto scorer = make_random_scorer(4);
  EXPECT_EQ(scorer->name(), "random");
  const HalfTensor keys(DType::kFloat16, 1, 1, 4096, 1);
  const auto scores = scores_of(*scorer, keys, 4096);
  EXPECT_EQ(scores_of(*scorer, keys, 1), scores);
  EXPECT_EQ(scores_of(*scorer, keys, 100), scores);
  double sum = 0;
  for (const float score : scores) {
    EXPECT_GE(score, 0.0F);
    EXPECT_LT(score, 1.0F);
    sum += score;
  }
  // The mean of n uniform numbers: 4 standard deviations of 1/sqrt(12 n).
  EXPECT_NEAR(sum / 4096, 0.5, 4 / std::sqrt(12.0 * 4096));
}

TEST(RandomScorerTest, DiffersForSeedLayerBatchAndHead) {
  const HalfTensor keys(DType::kFloat16, 2, 2, 16, 1);
  std::vector<std::vector<float>> all;
  for (const std::uint64_t seed : {1U, 2U}) {
    for (std::size_t place = 0; place < 8; ++place) {
      all.push_back(scores_of(
          *make_random_scorer(seed),
          keys,
          16,
          place / 4,
          place / 2 % 2,
          place % 2));
    }
  }
  EXPECT_EQ(scores_of(*make_random_scorer(1), keys, 16), all[0]);
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

TEST(ScorerTest, ServesAnyLayerUnlessItSaysOtherwise) {
  for (const auto& scorer :
       {make_streaming_scorer(), make_knorm_scorer(), make_random_scorer()}) {
    EXPECT_EQ(error_of([&] { scorer->check_layer(99, 7, 5); }), std::nullopt);
  }
}

// Rows that were overwritten in their slots, and new ones behind them.
TEST(ScoreRowsTest, GivesRowsWhatTheyGetWhenTheyEnter) {
  const test::Model& model = test::two_layers();
  constexpr std::size_t kNew = 7;
  for (const std::string_view name :
       {"auto", "qfilters", "streaming", "knorm", "random"}) {
    SCOPED_TRACE(std::string(name));
    const Policy policy =
        Policy::make(name, test::budget(20, 2, 5), model.filters_for(name));
    SequenceOptions options = model.options();
    options.order = RowOrder::kSlot;
    SequenceCache cache(model.layers, policy, options);
    model.feed(cache, std::vector<std::size_t>(80, 1));
    model.append(cache, kNew);
    SequenceCache entered(
        model.layers,
        Policy::make(
            name,
            test::budget(test::kModelTokens, 0, 0),
            model.filters_for(name)),
        options);
    model.feed(entered, {cache.offset() + kNew});
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
      const RowsView rows = cache.rows(l);
      const std::size_t heads = model.layers[l].kv_heads;
      for (std::size_t g = 0; g < rows.shape().groups(); ++g) {
        const RescoreInput in{l, g / heads, g % heads, rows};
        EXPECT_EQ(in.group(), g);
        std::vector<float> scores(rows.rows(g));
        score_rows(*policy.scorer(), in, scores);
        for (std::size_t r = 0; r < scores.size(); ++r) {
          const auto position = static_cast<std::size_t>(rows.position(g, r));
          ASSERT_EQ(scores[r], entered.store(l).scores(g)[position]);
        }
      }
    }
  }
}

TEST(ScoreRowsTest, RefusesRoomForOtherRows) {
  const test::Model& model = test::two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {9});
  for (const std::size_t size : {0U, 8U, 10U}) {
    std::vector<float> scores(size);
    EXPECT_THAT(
        error_of([&] {
          score_rows(*make_knorm_scorer(), {0, 0, 0, cache.rows(0)}, scores);
        }),
        IsError(
            ErrorKind::kShape,
            "room for " + std::to_string(size) + " scores, not 9"));
  }
}

}  // namespace
}  // namespace qfilters
