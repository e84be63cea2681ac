#include "qfilters/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "unit/attention_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using ::testing::Each;

using Call = test::AttentionCall;
using Case = test::AttentionCase;
using test::bits_of;
using test::error_of;
using test::FloatTensor;
using test::HalfTensor;
using test::IsError;
using test::random_floats;
using test::random_halves;

TEST(AttentionTest, ReturnsTheOnlyVisibleValue) {
  Call call({.tokens = 1, .key_dim = 5, .value_dim = 7, .share = 1});
  const auto out = call.run();
  for (std::size_t h = 0; h < 2; ++h) {
    for (std::size_t d = 0; d < 7; ++d) {
      EXPECT_EQ(out[h * 7 + d], from_float16(call.values().row(0, h, 0)[d]));
    }
  }
}

TEST(AttentionTest, AveragesTheValuesOfEqualScores) {
  Call call({.stored = 3, .tokens = 2, .value_dim = 1, .kv_heads = 1});
  std::fill(call.queries().data().begin(), call.queries().data().end(), 0.0F);
  for (std::size_t t = 0; t < 5; ++t) {
    call.values().row(0, 0, t)[0] = to_float16(static_cast<float>(t));
  }
  // Stored rows hold the values given before; only the new ones changed.
  std::vector<std::uint16_t> value(1);
  double sum = 0;
  for (std::size_t r = 0; r < 3; ++r) {
    call.rows().read_value(0, r, value.data());
    sum += from_float16(value[0]);
  }
  const auto out = call.run();
  EXPECT_NEAR(out[0], (sum + 3) / 4, 1e-6);
  EXPECT_NEAR(out[1], (sum + 3 + 4) / 5, 1e-6);
}

class AttentionCaseTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionCaseTest, AgreesWithFloat64) {
  Call(GetParam()).expect_agreement();
}

TEST_P(AttentionCaseTest, HasTheSameBitsForEveryThreadCount) {
  const Call call(GetParam());
  const auto one = bits_of(call.run(1));
  EXPECT_EQ(bits_of(call.run(2)), one);
  EXPECT_EQ(bits_of(call.run(7)), one);
}

std::vector<Case> dims() {
  std::vector<Case> out;
  for (const std::size_t dim :
       {1U, 2U, 15U, 16U, 17U, 33U, 64U, 80U, 96U, 128U, 256U}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      Case c{.stored = 70, .tokens = 5, .key_dim = dim, .value_dim = dim};
      c.dtype = dtype;
      out.push_back(c);
      out.push_back(c);
      out.back().format = RowFormat::kInt8;
    }
  }
  return out;
}

std::vector<Case> block_borders() {
  std::vector<Case> out;
  for (const std::size_t stored : {0U, 1U, 63U, 64U, 65U, 130U}) {
    for (const std::size_t tokens : {1U, 2U, 63U, 64U, 65U, 130U}) {
      out.push_back(
          {.stored = stored, .tokens = tokens, .key_dim = 16, .value_dim = 24});
      out.push_back(out.back());
      out.back().format = RowFormat::kInt8;
    }
  }
  return out;
}

std::vector<Case> features(RowFormat format) {
  const DType bf16 = DType::kBFloat16;
  std::vector<Case> out = {
      {.stored = 90, .tokens = 20, .key_dim = 64, .value_dim = 96},
      {.stored = 90, .tokens = 20, .key_dim = 80, .value_dim = 17},
      {.stored = 200, .tokens = 9, .batch = 2, .kv_heads = 3, .ragged = true},
      {.stored = 99, .tokens = 70, .kv_heads = 1, .share = 9, .dtype = bf16},
      {.stored = 99, .tokens = 9, .kv_heads = 4, .share = 1, .ragged = true},
      {.stored = 64, .tokens = 2, .kv_heads = 1, .share = 70},
      {.stored = 80, .tokens = 30, .options = {.scale = 0.7F}},
      {.stored = 80, .tokens = 30, .options = {.scale = -1.0F}},
      {.stored = 80, .tokens = 30, .options = {.soft_cap = 1.5F}},
      {.stored = 80, .tokens = 30, .options = {.soft_cap = 50.0F}},
      {.stored = 150, .tokens = 80, .options = {.window = 1}},
      {.stored = 150, .tokens = 80, .options = {.window = 63}},
      {.stored = 150, .tokens = 80, .options = {.window = 64}},
      {.stored = 150, .tokens = 80, .options = {.window = 100}},
      {.stored = 150, .tokens = 80, .options = {.window = 1000}},
      {.stored = 150,
       .tokens = 80,
       .batch = 2,
       .ragged = true,
       .options = {.soft_cap = 5.0F, .window = 40}},
  };
  for (Case& c : out)
    c.format = format;
  return out;
}

// Around the rows that are summed apart, 1,024 at a time.
std::vector<Case> row_blocks() {
  const RowFormat int8 = RowFormat::kInt8;
  std::vector<Case> out;
  for (const std::size_t stored : {1022U, 1023U, 1024U, 2047U, 2048U}) {
    for (const std::size_t tokens : {1U, 2U, 70U}) {
      out.push_back(
          {.stored = stored, .tokens = tokens, .key_dim = 16, .value_dim = 24});
      out.push_back(out.back());
      out.back().format = RowFormat::kInt8;
    }
  }
  out.insert(
      out.end(),
      {{.stored = 3500, .key_dim = 80, .kv_heads = 1, .share = 4},
       {.stored = 3500, .batch = 2, .kv_heads = 3, .ragged = true},
       {.stored = 2100, .tokens = 20, .kv_heads = 3, .ragged = true},
       {.stored = 3000, .tokens = 9, .options = {.soft_cap = 5.0F}},
       {.stored = 3000, .tokens = 9, .options = {.window = 20}},
       {.stored = 3000, .tokens = 70, .options = {.window = 960}},
       {.stored = 3000, .tokens = 9, .options = {.window = 1025}},
       {.stored = 3500, .key_dim = 80, .share = 4, .format = int8},
       {.stored = 3500, .batch = 2, .format = int8, .ragged = true},
       {.stored = 900, .tokens = 1300, .key_dim = 16, .format = int8},
       {.stored = 3000, .format = int8, .options = {.soft_cap = 5.0F}},
       {.stored = 3000,
        .tokens = 70,
        .format = int8,
        .options = {.window = 960}}});
  return out;
}

INSTANTIATE_TEST_SUITE_P(
    Dims, AttentionCaseTest, ::testing::ValuesIn(dims()), [](const auto& c) {
      return name_of(c.param);
    });
INSTANTIATE_TEST_SUITE_P(
    BlockBorders,
    AttentionCaseTest,
    ::testing::ValuesIn(block_borders()),
    [](const auto& c) { return name_of(c.param); });
INSTANTIATE_TEST_SUITE_P(
    RowBlocks,
    AttentionCaseTest,
    ::testing::ValuesIn(row_blocks()),
    [](const auto& c) { return name_of(c.param); });
INSTANTIATE_TEST_SUITE_P(
    Features,
    AttentionCaseTest,
    ::testing::ValuesIn(features(RowFormat::kSame)),
    [](const auto& c) { return name_of(c.param); });
INSTANTIATE_TEST_SUITE_P(
    Int8Features,
    AttentionCaseTest,
    ::testing::ValuesIn(features(RowFormat::kInt8)),
    [](const auto& c) { return name_of(c.param); });

TEST(AttentionTest, TakesAHugeWindowAsNone) {
  Case c{.stored = 70, .tokens = 9};
  const auto want = bits_of(Call(c).run());
  for (const std::size_t window :
       {std::size_t{79}, std::numeric_limits<std::size_t>::max()}) {
    c.options.window = window;
    EXPECT_EQ(bits_of(Call(c).run()), want) << window;
  }
}

// All of attention's output for a sequence that keeps every row, given in
// micro-batches of `sizes`.
std::vector<float> attend_in(
    const std::vector<std::size_t>& sizes,
    const HalfTensor& keys,
    const HalfTensor& values,
    const FloatTensor& queries,
    const AttentionOptions& attention = {}) {
  const TensorView& k = keys.view();
  const TensorView& q = queries.view();
  SequenceOptions options;
  options.dtype = k.dtype;
  SequenceCache cache(
      {{k.heads, k.dim, values.view().dim, attention.window}},
      Policy::full(),
      options);
  FloatTensor out(DType::kFloat32, 1, q.heads, q.tokens, values.view().dim);
  std::size_t first = 0;
  for (const std::size_t count : sizes) {
    cache.begin(count);
    cache.append(0, keys.slice(first, count), values.slice(first, count));
    OutputView to = OutputView::dense(
        out.data().data(), 1, q.heads, q.tokens, values.view().dim);
    to.data = to.row(0, 0, first);
    to.tokens = count;
    attend(queries.slice(first, count), cache.rows(0), attention, to);
    cache.commit();
    first += count;
  }
  return out.data();
}

TEST(AttentionTest, HasTheSameBitsHoweverTheTokensAreSplit) {
  constexpr std::size_t kTokens = 150;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const HalfTensor keys = random_halves(1, dtype, 1, 2, kTokens, 48);
    const HalfTensor values = random_halves(2, dtype, 1, 2, kTokens, 33);
    const FloatTensor queries = random_floats(3, 1, 6, kTokens, 48);
    const auto whole = bits_of(attend_in({kTokens}, keys, values, queries));
    for (const std::size_t size : {1U, 2U, 3U, 7U, 63U, 64U, 65U, 149U}) {
      const auto sizes = test::chunks(kTokens, size);
      EXPECT_EQ(bits_of(attend_in(sizes, keys, values, queries)), whole)
          << "micro-batches of " << size;
    }
    EXPECT_EQ(
        bits_of(attend_in({1, 60, 5, 0, 64, 20}, keys, values, queries)),
        whole);
  }
}

// The same over many row blocks, where threads share heads and a windowed
// layer has dropped its first rows.
TEST(AttentionTest, HasTheSameBitsHoweverManyRowsAreSplit) {
  constexpr std::size_t kTokens = 2500;
  const DType dtype = DType::kFloat16;
  const HalfTensor keys = random_halves(1, dtype, 1, 2, kTokens, 16);
  const HalfTensor values = random_halves(2, dtype, 1, 2, kTokens, 20);
  const FloatTensor queries = random_floats(3, 1, 2, kTokens, 16);
  for (const std::size_t window : {0U, 70U, 1100U}) {
    AttentionOptions options;
    options.window = window;
    const auto whole =
        bits_of(attend_in({kTokens}, keys, values, queries, options));
    for (const std::size_t size : {1U, 65U, 700U, 1024U, 1500U}) {
      for (const int threads : {1, 2, 5}) {
        // Where cores are few, threads wait long for each other.
        if (size < 100 && threads > 1) continue;
        options.threads = threads;
        const auto sizes = test::chunks(kTokens, size);
        const auto got = attend_in(sizes, keys, values, queries, options);
        ASSERT_EQ(bits_of(got), whole)
            << "window " << window << ", micro-batches of " << size << ", "
            << threads << " threads";
      }
    }
  }
}

TEST(AttentionTest, NeverLetsALaterRowReachAnEarlierQuery) {
  Call call({.stored = 70, .tokens = 30, .share = 1});
  const auto before = call.run();
  for (const std::uint16_t poison :
       {std::uint16_t{0x7C00}, std::uint16_t{0x7E00}}) {
    // New token 12, in both heads: keys and values that are not finite.
    for (std::size_t h = 0; h < 2; ++h) {
      std::ranges::fill(call.keys().row(0, h, 82), poison);
      std::ranges::fill(call.values().row(0, h, 82), poison);
    }
    const auto after = call.run();
    for (std::size_t h = 0; h < 2; ++h) {
      constexpr std::size_t kDim = 64;
      for (std::size_t i = 0; i < 12 * kDim; ++i) {
        ASSERT_EQ(after[h * 30 * kDim + i], before[h * 30 * kDim + i]);
      }
    }
  }
}

TEST(AttentionTest, StaysFiniteWhenScoresAreHuge) {
  Call call({.stored = 70, .tokens = 9, .options = {.scale = 1000.0F}});
  EXPECT_THAT(call.run(), Each(::testing::Truly([](float x) {
                return std::isfinite(x) && std::abs(x) < 4.0F;
              })));
}

TEST(AttentionTest, WritesOnlyWhereTheOutputViewPoints) {
  Call call({.stored = 10, .tokens = 3, .value_dim = 4, .kv_heads = 1});
  const auto dense = call.run();
  // [token][head][dim + 2], as a transposed layout with padding.
  std::vector<float> out(36, -7.0F);
  const OutputView view{out.data(), 1, 2, 3, 4, 36, 6, 12};
  attend(call.queries().view(), call.rows(), {}, view);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t d = 0; d < 6; ++d) {
        const float want = d < 4 ? dense[(h * 3 + t) * 4 + d] : -7.0F;
        EXPECT_EQ(out[(t * 2 + h) * 6 + d], want);
      }
    }
  }
}

TEST(AttentionTest, ReadsStridedQueries) {
  Call call({.stored = 10, .tokens = 3, .key_dim = 8, .kv_heads = 1});
  const auto want = call.run();
  std::vector<float> moved(48);  // [token][head][dim]
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t h = 0; h < 2; ++h) {
      std::ranges::copy(call.queries().row(0, h, t), &moved[(t * 2 + h) * 8]);
    }
  }
  const TensorView view{moved.data(), DType::kFloat32, 1, 2, 3, 8, 48, 8, 16};
  std::vector<float> out(want.size());
  attend(view, call.rows(), {}, OutputView::dense(out.data(), 1, 2, 3, 64));
  EXPECT_EQ(out, want);
}

TEST(AttentionTest, DoesNothingWithoutNewRows) {
  const Call call({.stored = 10, .tokens = 0});
  EXPECT_TRUE(call.run().empty());
}

TEST(AttentionTest, RejectsShapesThatDoNotFitAndWritesNothing) {
  Call call({.stored = 10, .tokens = 3, .key_dim = 8, .value_dim = 4});
  std::vector<float> out(48, -7.0F);
  const OutputView good = OutputView::dense(out.data(), 1, 4, 3, 4);
  const auto with =
      [&](const std::function<void(TensorView&, OutputView&)>& f) {
        TensorView queries = call.queries().view();
        OutputView to = good;
        f(queries, to);
        auto error = error_of([&] { attend(queries, call.rows(), {}, to); });
        EXPECT_THAT(out, Each(-7.0F));
        return error;
      };
  const auto is_shape = IsError(
      ErrorKind::kShape, "do not fit rows [1, 2, 3, 8] with value dim 4");
  using Q = TensorView;
  using O = OutputView;
  EXPECT_THAT(with([](Q& q, O&) { q.dtype = DType::kFloat16; }), is_shape);
  EXPECT_THAT(with([](Q& q, O& o) { q.batch = o.batch = 2; }), is_shape);
  EXPECT_THAT(with([](Q& q, O& o) { q.heads = o.heads = 3; }), is_shape);
  EXPECT_THAT(with([](Q& q, O& o) { q.heads = o.heads = 0; }), is_shape);
  EXPECT_THAT(with([](Q& q, O& o) { q.tokens = o.tokens = 2; }), is_shape);
  EXPECT_THAT(with([](Q& q, O&) { q.dim = 7; }), is_shape);
  EXPECT_THAT(with([](Q&, O& o) { o.batch = 2; }), is_shape);
  EXPECT_THAT(with([](Q&, O& o) { o.heads = 2; }), is_shape);
  EXPECT_THAT(with([](Q&, O& o) { o.tokens = 4; }), is_shape);
  EXPECT_THAT(with([](Q&, O& o) { o.dim = 8; }), is_shape);
  EXPECT_EQ(
      error_of([&] { attend(call.queries().view(), call.rows(), {}, good); }),
      std::nullopt);
}

TEST(AttentionTest, RejectsOptionsOutOfRangeAndWritesNothing) {
  Call call({.stored = 10, .tokens = 3, .key_dim = 8, .value_dim = 4});
  std::vector<float> out(48, -7.0F);
  for (const AttentionOptions& bad :
       {AttentionOptions{.threads = 0},
        AttentionOptions{.threads = -1},
        AttentionOptions{.soft_cap = -1.0F},
        AttentionOptions{.soft_cap = test::kNaN},
        AttentionOptions{.soft_cap = test::kInfinity},
        AttentionOptions{.scale = test::kNaN},
        AttentionOptions{.scale = -test::kInfinity}}) {
    EXPECT_THAT(
        error_of([&] {
          attend(
              call.queries().view(),
              call.rows(),
              bad,
              OutputView::dense(out.data(), 1, 4, 3, 4));
        }),
        IsError(ErrorKind::kInvalidArgument, "attend: "));
    EXPECT_THAT(out, Each(-7.0F));
  }
}

}  // namespace
}  // namespace qfilters
