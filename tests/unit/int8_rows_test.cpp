// Rows stored as int8: what they read as, and what a SequenceCache and
// attention make of them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/error.h"
#include "qfilters/kv_store.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using ::testing::ElementsAre;

using test::budget;
using test::contents_of;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::Model;
using test::qfilters_policy;
using test::random_halves;
using test::two_layers;

// One group of int8 rows that are given one by one.
struct Int8Store {
  explicit Int8Store(DType dtype, std::size_t dim)
      : store(pool, {1, 1, dim, dim, dtype, RowFormat::kInt8}) {}

  // The row is key and value alike.
  void append(const std::vector<std::uint16_t>& row) {
    store.reserve(0, store.rows(0) + 1);
    store.append_row(0, row.data(), row.data(), 0, 0);
  }

  // Key or value of the last row, in float32.
  [[nodiscard]] std::vector<float> last(bool key) const {
    const RowShape& shape = store.shape();
    std::vector<std::uint16_t> row(shape.key_dim);
    const std::size_t r = store.rows(0) - 1;
    if (key) {
      store.read_key(0, r, row.data());
    } else {
      store.read_value(0, r, row.data());
    }
    std::vector<float> out;
    for (const std::uint16_t x : row)
      out.push_back(test::decode(shape.dtype, x));
    return out;
  }

  RowPool pool;
  KVStore store;
};

TEST(Int8RowsTest, AreOffByHalfAScaleAtMost) {
  constexpr std::size_t kDim = 40;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Int8Store f(dtype, kDim);
    const HalfTensor rows = random_halves(3, dtype, 1, 1, 200, kDim);
    for (std::size_t t = 0; t < 200; ++t) {
      const auto row = rows.row(0, 0, t);
      f.append({row.begin(), row.end()});
      float largest = 0;
      for (const std::uint16_t x : row)
        largest = std::max(largest, std::abs(test::decode(dtype, x)));
      // Half a scale, and the rounding to the 16 bits of a read.
      const float unit = dtype == DType::kFloat16 ? 0x1p-11F : 0x1p-8F;
      const float most = largest / 127 * 0.50001F + largest * unit;
      for (const bool key : {true, false}) {
        const auto read = f.last(key);
        for (std::size_t d = 0; d < kDim; ++d)
          ASSERT_LE(std::abs(read[d] - test::decode(dtype, row[d])), most);
      }
    }
  }
}

TEST(Int8RowsTest, KeepWhatEightBitsCanHold) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const float unit : {1.0F, 0x1p-12F, 0x1p8F}) {
      Int8Store f(dtype, 255);
      std::vector<std::uint16_t> row;
      for (int x = -127; x <= 127; ++x)
        row.push_back(test::encode(dtype, unit * static_cast<float>(x)));
      f.append(row);
      for (const bool key : {true, false}) {
        const auto read = f.last(key);
        for (int x = -127; x <= 127; ++x)
          ASSERT_EQ(
              read[static_cast<std::size_t>(x + 127)],
              unit * static_cast<float>(x));
      }
    }
  }
}

TEST(Int8RowsTest, HoldZerosAndTheExtremesOfTheirType) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    // The smallest and the largest number of the type, beside a zero.
    const std::uint16_t largest = dtype == DType::kFloat16 ? 0x7BFF : 0x7F7F;
    for (const std::uint16_t x :
         {std::uint16_t{0}, std::uint16_t{1}, largest}) {
      Int8Store f(dtype, 3);
      const auto minus = static_cast<std::uint16_t>(x | 0x8000U);
      f.append({x, minus, 0});
      const float value = test::decode(dtype, x);
      EXPECT_THAT(f.last(true), ElementsAre(value, -value, 0.0F)) << x;
      EXPECT_THAT(f.last(false), ElementsAre(value, -value, 0.0F)) << x;
    }
  }
}

TEST(Int8RowsTest, WithAnElementThatIsNotFiniteReadAsNaN) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const float odd : {test::kNaN, test::kInfinity, -test::kInfinity}) {
      Int8Store f(dtype, 2);
      f.append({test::encode(dtype, odd), test::encode(dtype, 1.0F)});
      const auto is_nan = ::testing::Each(::testing::IsNan());
      EXPECT_THAT(f.last(true), is_nan);
      EXPECT_THAT(f.last(false), is_nan);
      f.append({0, test::encode(dtype, 1.0F)});
      EXPECT_THAT(f.last(true), ElementsAre(0.0F, 1.0F));
    }
  }
}

TEST(Int8RowsTest, ASavedRowIsAppendedBitForBit) {
  constexpr std::size_t kDim = 5;
  for (const RowFormat format : {RowFormat::kSame, RowFormat::kInt8}) {
    RowPool pool;
    const RowShape shape{1, 1, kDim, kDim, DType::kFloat16, format};
    KVStore store(pool, shape);
    KVStore copy(pool, shape);
    store.reserve(0, 70);
    copy.reserve(0, 70);
    const HalfTensor rows = random_halves(1, DType::kFloat16, 1, 2, 70, kDim);
    std::vector<std::byte> saved(shape.row_bytes());
    std::vector<std::byte> again(saved.size());
    std::vector<std::uint16_t> before(kDim);
    std::vector<std::uint16_t> after(kDim);
    for (std::size_t r = 0; r < 70; ++r) {
      store.append_row(
          0, rows.row(0, 0, r).data(), rows.row(0, 1, r).data(), 7, 0.5F);
      store.save_row(0, r, saved.data());
      copy.append_saved_row(0, saved.data(), 9, 1.5F);
      copy.save_row(0, r, again.data());
      ASSERT_EQ(again, saved) << r;
      store.read_key(0, r, before.data());
      copy.read_key(0, r, after.data());
      ASSERT_EQ(after, before) << r;
      store.read_value(0, r, before.data());
      copy.read_value(0, r, after.data());
      ASSERT_EQ(after, before) << r;
    }
    EXPECT_EQ(copy.positions(0)[69], 9);
    EXPECT_EQ(copy.scores(0)[69], 1.5F);
  }
}

SequenceOptions int8_options(const Model& model) {
  SequenceOptions out = model.options();
  out.format = RowFormat::kInt8;
  return out;
}

TEST(Int8RowsTest, ASequenceRefusesAFormatThatIsNone) {
  SequenceOptions options = two_layers().options();
  options.format = static_cast<RowFormat>(2);
  EXPECT_THAT(
      error_of([&] {
        const SequenceCache cache(two_layers().layers, Policy::full(), options);
      }),
      IsError(ErrorKind::kInvalidArgument, "format=2"));
}

// Scores are of the rows as they came, so the format changes no kept row.
void expect_the_rows_of_the_same_scores(RowOrder order, std::size_t interval) {
  const Model& model = two_layers();
  const Policy policy = qfilters_policy(model, budget(40, 3, 9, interval));
  SequenceOptions options = model.options();
  options.order = order;
  SequenceCache same(model.layers, policy, options);
  options.format = RowFormat::kInt8;
  SequenceCache int8(model.layers, policy, options);
  std::vector<std::size_t> sizes = {100, 7, 90};
  sizes.insert(sizes.end(), 60, 1);  // in slot order each takes a place
  model.feed(same, sizes);
  model.feed(int8, sizes);
  const auto want = contents_of(same);
  const auto got = contents_of(int8);
  for (std::size_t l = 0; l < want.layers.size(); ++l) {
    const LayerShape& shape = model.layers[l];
    for (std::size_t g = 0; g < want.layers[l].size(); ++g) {
      const auto& group = got.layers[l][g];
      EXPECT_EQ(group.positions, want.layers[l][g].positions);
      EXPECT_EQ(group.scores, want.layers[l][g].scores);
      // And the rows are those that came, rounded once, however they moved.
      std::vector<std::uint16_t> rows;
      for (const std::int32_t position : group.positions) {
        for (const auto* tensor : {&model.keys[l], &model.values[l]}) {
          const auto row = test::read_back(
              model.dtype,
              test::reference_quantized(
                  model.dtype,
                  tensor->row(
                      g / shape.kv_heads,
                      g % shape.kv_heads,
                      static_cast<std::size_t>(position))));
          rows.insert(rows.end(), row.begin(), row.end());
        }
      }
      EXPECT_EQ(group.rows, rows);
    }
  }
}

TEST(Int8RowsTest, ASequenceKeepsTheRowsOfTheSameScores) {
  expect_the_rows_of_the_same_scores(RowOrder::kTemporal, 5);
}

TEST(Int8RowsTest, ARowThatTakesAnothersPlaceIsRoundedToo) {
  expect_the_rows_of_the_same_scores(RowOrder::kSlot, 0);
}

TEST(Int8RowsTest, ReadKeysGivesStoredKeysRoundedAndNewOnesAsTheyCame) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), int8_options(model));
  model.feed(cache, {70});
  model.append(cache, 2);
  const std::size_t dim = model.layers[0].key_dim;
  for (std::size_t g = 0; g < cache.store(0).shape().groups(); ++g) {
    std::vector<float> keys(72 * dim);
    read_keys(cache.rows(0), g, keys);
    for (std::size_t t = 0; t < 72; ++t) {
      const auto came = model.keys[0].row(g / 2, g % 2, t);
      const auto want =
          t < 70
              ? test::read_back(
                    model.dtype, test::reference_quantized(model.dtype, came))
              : std::vector(came.begin(), came.end());
      for (std::size_t d = 0; d < dim; ++d)
        ASSERT_EQ(keys[t * dim + d], test::decode(model.dtype, want[d])) << t;
    }
  }
}

TEST(Int8RowsTest, CountersCountTheBytesThatAreHeld) {
  const Model model({{2, 64, 64, 0}, {1, 32, 16, 70}});
  SequenceCache cache(model.layers, Policy::full(), int8_options(model));
  model.feed(cache, {130, 1});
  test::expect_recounted_stats(cache, 0, 0);
  // 131 rows are 3 blocks in each head of the first layer; the second keeps
  // those from position 0 on, its window reaches into the first block.
  EXPECT_EQ(
      cache.stats().kv_bytes,
      64U * (2 * 3 * (64 + 64 + 8) + 3 * (32 + 16 + 8)) -
          64U * (32 + 16 + 8) * (3 - cache.store(1).blocks(0).size()));
  EXPECT_EQ(
      cache.stats().kv_bytes_full, 131U * (2 * (64 + 64 + 8) + (32 + 16 + 8)));
}

TEST(Int8RowsTest, SetPolicyScoresTheRowsAsTheyReadBack) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), int8_options(model));
  model.feed(cache, {50});
  cache.set_policy(qfilters_policy(model, budget(40, 2, 8)));
  for (std::size_t l = 0; l < cache.layers(); ++l) {
    const KVStore& store = cache.store(l);
    const RowShape& shape = store.shape();
    std::vector<std::uint16_t> key(shape.key_dim);
    for (std::size_t g = 0; g < shape.groups(); ++g) {
      for (std::size_t r = 0; r < store.rows(g); ++r) {
        store.read_key(g, r, key.data());
        const auto filter = model.filters->layer(l).head(g % shape.kv_heads);
        EXPECT_EQ(
            store.scores(g)[r],
            test::canonical_score(model.dtype, key, filter, 1.0F));
      }
    }
  }
}

// Attention of one new token of layer 0; `threads` of them.
std::vector<float> attend_next(const SequenceCache& cache, int threads = 1) {
  const RowShape& shape = cache.store(0).shape();
  const auto queries =
      test::random_floats(3, shape.batch, 2 * shape.kv_heads, 1, shape.key_dim);
  std::vector<float> out(shape.batch * 2 * shape.kv_heads * shape.value_dim);
  attend(
      queries.view(),
      cache.rows(0),
      {.threads = threads},
      OutputView::dense(
          out.data(), shape.batch, 2 * shape.kv_heads, 1, shape.value_dim));
  return out;
}

TEST(Int8RowsTest, AttentionStaysNearThatOfTheRowsAsTheyCame) {
  const Model& model = two_layers();
  std::vector<std::vector<float>> outs;
  for (const RowFormat format : {RowFormat::kSame, RowFormat::kInt8}) {
    SequenceOptions options = model.options();
    options.format = format;
    SequenceCache cache(model.layers, Policy::full(), options);
    model.feed(cache, {150});
    model.append(cache, 1);
    outs.push_back(attend_next(cache));
  }
  double error = 0;
  for (std::size_t i = 0; i < outs[0].size(); ++i) {
    error = std::max(error, std::abs(double{outs[0][i]} - outs[1][i]));
  }
  // Values are off by 3.5 / 254 at most, weights by a few percent.
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.05);
}

TEST(Int8RowsTest, AStoredRowThatIsNotFiniteSpoilsItsHeadAlone) {
  Model model({{2, 24, 24, 0}});
  for (const auto poisoned : {&model.keys[0], &model.values[0]}) {
    std::ranges::fill(
        poisoned->row(0, 1, 20), test::encode(model.dtype, test::kInfinity));
  }
  const Model sound({{2, 24, 24, 0}});
  std::vector<std::vector<float>> outs;
  for (const Model* each : {static_cast<const Model*>(&model), &sound}) {
    SequenceCache cache(each->layers, Policy::full(), int8_options(*each));
    each->feed(cache, {70});
    each->append(cache, 1);
    outs.push_back(attend_next(cache));
  }
  constexpr std::size_t kHead = 2 * 24;  // two query heads
  for (std::size_t i = 0; i < kHead; ++i) {
    EXPECT_EQ(outs[0][i], outs[1][i]);
    EXPECT_TRUE(std::isnan(outs[0][kHead + i]));
  }
}

}  // namespace
}  // namespace qfilters
