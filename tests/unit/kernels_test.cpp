// Every kernel on every instruction set that this machine can run.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/isa.h"
#include "qfilters/kv_store.h"
#include "qfilters/rows_view.h"

#include "kernels/attend.h"
#include "kernels/score_keys.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using kernels::AttendTask;
using kernels::HalfRows;
using kernels::kTileRows;
using kernels::Softmax;

using test::bits_of;
using test::canonical_score;
using test::HalfTensor;
using test::random_filter;
using test::random_halves;

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

class KernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    set_isa(GetParam());
    ASSERT_EQ(active_isa(), GetParam());
  }

  void TearDown() override { set_isa("auto"); }
};

INSTANTIATE_TEST_SUITE_P(
    EachIsa,
    KernelsTest,
    ::testing::ValuesIn(runnable_isas()),
    [](const auto& isa) { return isa.param; });

HalfRows head_rows(const HalfTensor& keys) {
  const TensorView& view = keys.view();
  return {
      static_cast<const std::uint16_t*>(view.data),
      view.token_stride,
      view.tokens,
      view.dim,
      half_of(view.dtype)};
}

// Same bits; any NaN equals any other, payloads are not part of the contract.
void expect_same_scores(
    const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << "row " << i << ": " << got[i];
    } else {
      EXPECT_EQ(
          std::bit_cast<std::uint32_t>(got[i]),
          std::bit_cast<std::uint32_t>(want[i]))
          << "row " << i << ": " << got[i] << " for " << want[i];
    }
  }
}

std::vector<float> canonical_scores(
    const HalfTensor& keys, const std::vector<float>& filter, float sign) {
  std::vector<float> out;
  for (std::size_t t = 0; t < keys.view().tokens; ++t) {
    out.push_back(
        canonical_score(keys.view().dtype, keys.row(0, 0, t), filter, sign));
  }
  return out;
}

TEST_P(KernelsTest, ProjectRowsGivesTheCanonicalBits) {
  for (const DType dtype : kHalves) {
    for (const std::size_t dim :
         {1U,  2U,  7U,  8U,  9U,  15U,  16U,  17U,  31U,  32U,
          33U, 48U, 64U, 80U, 96U, 100U, 127U, 128U, 129U, 256U}) {
      for (const std::size_t padding : {0U, 1U, 13U}) {
        SCOPED_TRACE(std::to_string(dim) + " + " + std::to_string(padding));
        const HalfTensor keys =
            random_halves(dim, dtype, 1, 1, 11, dim, padding);
        const auto filter = random_filter(dim + padding, dim);
        for (const float sign : {1.0F, -1.0F}) {
          std::vector<float> out(11);
          kernels::project_rows(
              head_rows(keys), filter.data(), sign, out.data());
          expect_same_scores(out, canonical_scores(keys, filter, sign));
        }
      }
    }
  }
}

TEST_P(KernelsTest, ProjectRowsReadsEveryHalf) {
  for (const DType dtype : kHalves) {
    // Each 16-bit pattern alone in its row: NaN, infinities, subnormals.
    constexpr std::size_t kDim = 19;
    HalfTensor keys(dtype, 1, 1, 65536, kDim);
    for (std::size_t t = 0; t < 65536; ++t) {
      keys.row(0, 0, t)[t % kDim] = static_cast<std::uint16_t>(t);
    }
    const std::vector<float> filter(kDim, 1.0F);
    std::vector<float> out(65536);
    kernels::project_rows(head_rows(keys), filter.data(), 1.0F, out.data());
    expect_same_scores(out, canonical_scores(keys, filter, 1.0F));
  }
}

TEST_P(KernelsTest, ProjectRowsFollowsNegativeStrides) {
  const HalfTensor keys = random_halves(1, DType::kFloat16, 1, 1, 9, 40);
  const auto filter = random_filter(2, 40);
  HalfRows rows = head_rows(keys);
  rows.data += 8 * rows.stride;
  rows.stride = -rows.stride;
  std::vector<float> out(9);
  kernels::project_rows(rows, filter.data(), 1.0F, out.data());
  std::reverse(out.begin(), out.end());
  expect_same_scores(out, canonical_scores(keys, filter, 1.0F));
}

TEST_P(KernelsTest, SquareRowsGivesTheCanonicalBits) {
  for (const DType dtype : kHalves) {
    for (const std::size_t dim : {1U, 15U, 16U, 17U, 64U, 80U, 255U}) {
      const HalfTensor keys = random_halves(dim, dtype, 1, 1, 7, dim, 3);
      std::vector<float> out(7);
      kernels::square_rows(head_rows(keys), out.data());
      std::vector<float> want;
      for (std::size_t t = 0; t < 7; ++t) {
        std::vector<float> key;
        for (const auto x : keys.row(0, 0, t)) {
          key.push_back(test::decode(dtype, x));
        }
        want.push_back(canonical_score(dtype, keys.row(0, 0, t), key, 1.0F));
      }
      expect_same_scores(out, want);
    }
  }
}

// Rows of one head as the kernels see them: tiles, and behind the last row
// NaN, which must never show. `int8_rows` of them are int8, in tiles of their
// own.
struct Head {
  Head(
      DType dtype,
      std::size_t row_count,
      std::size_t dk,
      std::size_t dv,
      std::size_t int8_count = 0)
      : rows(row_count),
        int8_rows(int8_count),
        quantized(pool, {1, 1, dk, dv, dtype, RowFormat::kInt8}),
        store(pool, {1, 1, dk, dv, dtype}),
        keys(random_halves(1, dtype, 1, 1, rows, dk)),
        values(random_halves(2, dtype, 1, 1, rows, dv)) {
    fill(quantized, 0, int8_rows);
    fill(store, int8_rows, rows);
  }

  /// The same rows, as attend() would see them.
  [[nodiscard]] RowsView view() const {
    return {
        quantized,
        keys.slice(int8_rows, rows - int8_rows),
        values.slice(int8_rows, rows - int8_rows),
        static_cast<std::int32_t>(int8_rows)};
  }

  std::size_t rows;
  std::size_t int8_rows;
  RowPool pool;
  KVStore quantized;
  KVStore store;
  HalfTensor keys;
  HalfTensor values;
  std::vector<const std::uint16_t*> tiles;

 private:
  void fill(KVStore& to, std::size_t begin, std::size_t end) {
    to.reserve(0, end - begin);
    const std::size_t slots = to.bytes() / to.shape().row_bytes();
    for (std::byte* block : to.blocks(0)) {
      std::fill_n(
          reinterpret_cast<std::uint16_t*>(block),
          to.shape().block_bytes() / 2,
          std::uint16_t{0x7FFF});
      tiles.push_back(reinterpret_cast<const std::uint16_t*>(block));
    }
    EXPECT_EQ(slots % kTileRows, 0U);
    std::vector<std::uint32_t> all(end - begin);
    std::iota(all.begin(), all.end(), static_cast<std::uint32_t>(begin));
    const std::vector<float> scores(rows);
    to.append(0, keys.view(), values.view(), all, 0, scores);
  }
};

// Queries with their visible rows, and what the kernels make of them.
struct Queries {
  std::vector<float> query;  // scaled
  std::vector<std::uint32_t> first;
  std::vector<std::uint32_t> last;
  float soft_cap = 0;

  std::vector<float> run(const Head& head, bool prefill) const {
    const RowShape& shape = head.store.shape();
    const std::size_t count = first.size();
    std::vector<float> out(count * shape.value_dim, -1.0F);
    std::vector<float> scratch(
        kernels::attend_scratch(count, shape.key_dim, shape.value_dim),
        test::kNaN);
    std::vector<Softmax> softmax(count);
    const AttendTask task{
        head.tiles.data(),
        head.tiles.size(),
        head.int8_rows,
        shape.key_dim,
        shape.value_dim,
        half_of(shape.dtype),
        soft_cap,
        count,
        query.data(),
        first.data(),
        last.data(),
        out.data(),
        softmax.data()};
    if (prefill) {
      kernels::attend_prefill(task, scratch.data());
    } else {
      kernels::attend_decode(task, scratch.data());
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float sum = softmax[i / shape.value_dim].sum;
      out[i] = sum == 0.0F ? 0.0F : out[i] / sum;
    }
    return out;
  }
};

// `count` causal queries at the end of the rows, 1 / sqrt(dim) applied.
Queries causal_queries(
    const Head& head, std::size_t count, std::size_t window, float soft_cap) {
  const std::size_t dim = head.store.shape().key_dim;
  Queries out;
  out.query = random_filter(9, count * dim);
  out.soft_cap = soft_cap;
  for (float& x : out.query) {
    x /= std::sqrt(static_cast<float>(dim));
  }
  for (std::size_t q = 0; q < count; ++q) {
    const std::size_t last = head.rows - count + q + 1;
    out.last.push_back(static_cast<std::uint32_t>(last));
    out.first.push_back(static_cast<std::uint32_t>(
        window == 0 ? 0 : last - std::min(last, window)));
  }
  return out;
}

struct Case {
  std::size_t rows;
  std::size_t queries;
  std::size_t key_dim;
  std::size_t value_dim;
  std::size_t window = 0;
  float soft_cap = 0;
};

constexpr Case kCases[] = {
    {1, 1, 1, 1},
    {3, 3, 15, 17},
    {63, 1, 16, 16},
    {64, 5, 17, 15},
    {65, 7, 64, 64},
    {130, 13, 80, 80},
    {200, 64, 96, 40},
    {193, 6, 128, 128},
    {129, 2, 256, 256},
    {300, 20, 64, 64, 50, 0},
    {300, 9, 33, 31, 1, 0},
    {150, 12, 64, 64, 0, 2.5F},
};

// None, all, all but the new ones of a case.
std::vector<std::size_t> int8_counts(const Case& c) {
  return {0, c.rows, c.rows - c.queries};
}

TEST_P(KernelsTest, DecodeAndPrefillGiveTheSameBits) {
  for (const DType dtype : kHalves) {
    for (const Case& c : kCases) {
      for (const std::size_t int8_rows : int8_counts(c)) {
        const Head head(dtype, c.rows, c.key_dim, c.value_dim, int8_rows);
        const Queries queries =
            causal_queries(head, c.queries, c.window, c.soft_cap);
        EXPECT_EQ(
            bits_of(queries.run(head, false)), bits_of(queries.run(head, true)))
            << c.rows << " rows, dims " << c.key_dim << " " << c.value_dim
            << ", int8 " << int8_rows;
      }
    }
  }
}

TEST_P(KernelsTest, AttendAgreesWithFloat64) {
  for (const DType dtype : kHalves) {
    for (const Case& c : kCases) {
      for (const std::size_t int8_rows : {std::size_t{0}, c.rows - c.queries}) {
        SCOPED_TRACE(
            std::to_string(c.rows) + " rows, dims " +
            std::to_string(c.key_dim) + " " + std::to_string(c.value_dim) +
            ", int8 " + std::to_string(int8_rows));
        const Head head(dtype, c.rows, c.key_dim, c.value_dim, int8_rows);
        const Queries queries =
            causal_queries(head, c.queries, c.window, c.soft_cap);
        const auto got = queries.run(head, false);
        for (std::size_t q = 0; q < c.queries; ++q) {
          const auto want = test::reference_query(
              std::span(queries.query).subspan(q * c.key_dim, c.key_dim),
              head.view(),
              0,
              c.rows - c.queries + q - int8_rows,
              {.scale = 1, .soft_cap = c.soft_cap, .window = c.window});
          for (std::size_t d = 0; d < c.value_dim; ++d) {
            ASSERT_NEAR(got[q * c.value_dim + d], want.value[d], want.bound[d])
                << "query " << q << " dim " << d;
          }
        }
      }
    }
  }
}

void expect_same_bits_alone(const Head& head) {
  const Queries all = causal_queries(head, 17, 0, 0);
  const auto together = bits_of(all.run(head, true));
  for (std::size_t q = 0; q < 17; ++q) {
    Queries alone;
    alone.query.assign(
        all.query.begin() + static_cast<std::ptrdiff_t>(q * 64),
        all.query.begin() + static_cast<std::ptrdiff_t>(q * 64 + 64));
    alone.first = {all.first[q]};
    alone.last = {all.last[q]};
    const auto row = bits_of(alone.run(head, false));
    EXPECT_TRUE(std::equal(
        row.begin(),
        row.end(),
        together.begin() + static_cast<std::ptrdiff_t>(q * 80)))
        << "query " << q;
  }
}

TEST_P(KernelsTest, AQueryHasTheSameBitsInAnyCompany) {
  expect_same_bits_alone(Head(DType::kFloat16, 200, 64, 80));
  expect_same_bits_alone(Head(DType::kFloat16, 200, 64, 80, 183));
}

// An int8 row is spoilt by its scales.
TEST_P(KernelsTest, Int8RowsOutsideAQuerysRangeNeverReachIt) {
  const Head head(DType::kFloat16, 70, 16, 16, 70);
  auto* scales = reinterpret_cast<float*>(
      head.quantized.blocks(0)[0] + kTileRows * std::size_t{32});
  const Queries queries = causal_queries(head, 12, 0, 0);
  for (const bool prefill : {false, true}) {
    const auto before = queries.run(head, prefill);
    const float saved[] = {scales[60], scales[kTileRows + 60]};
    for (const float poison : {test::kNaN, test::kInfinity}) {
      // Row 60 is seen by the queries that end after it, from query 2 on.
      scales[60] = scales[kTileRows + 60] = poison;
      const auto after = queries.run(head, prefill);
      for (std::size_t i = 0; i < 32; ++i) {
        EXPECT_EQ(after[i], before[i]) << "query " << i / 16;
      }
      for (std::size_t i = 32; i < after.size() && std::isnan(poison); ++i) {
        EXPECT_TRUE(std::isnan(after[i])) << "query " << i / 16;
      }
    }
    scales[60] = saved[0];
    scales[kTileRows + 60] = saved[1];
  }
}

TEST_P(KernelsTest, RowsOutsideAQuerysRangeNeverReachIt) {
  // Among its neighbours' rows are infinities and NaN, in keys and values.
  Head head(DType::kFloat16, 70, 16, 16);
  auto* tile = reinterpret_cast<std::uint16_t*>(head.store.blocks(0)[0]);
  const Queries queries = causal_queries(head, 12, 0, 0);
  for (const bool prefill : {false, true}) {
    const auto before = queries.run(head, prefill);
    for (const std::uint16_t poison :
         {std::uint16_t{0x7C00},
          std::uint16_t{0xFC00},
          std::uint16_t{0x7E00}}) {
      // Row 60 is seen by the queries that end after it, from query 2 on.
      std::vector<std::uint16_t> saved(
          tile, tile + head.store.shape().block_bytes() / 2);
      for (std::size_t d = 0; d < 16; ++d) {
        tile[d * kTileRows + 60] = poison;
        tile[(kTileRows + 60) * 16 + d] = poison;
      }
      const auto after = queries.run(head, prefill);
      std::copy(saved.begin(), saved.end(), tile);
      for (std::size_t i = 0; i < 32; ++i) {
        EXPECT_EQ(after[i], before[i]) << "query " << i / 16;
      }
    }
  }
}

TEST_P(KernelsTest, AQueryThatSeesNoRowGivesZeros) {
  const Head head(DType::kBFloat16, 100, 8, 24);
  Queries queries = causal_queries(head, 3, 0, 0);
  queries.first = {0, 40, 80};
  queries.last = {10, 40, 70};
  const auto out = queries.run(head, true);
  for (std::size_t d = 0; d < 24; ++d) {
    EXPECT_NE(out[d], 0.0F);
    EXPECT_EQ(out[24 + d], 0.0F);
    EXPECT_EQ(out[48 + d], 0.0F);
  }
}

TEST_P(KernelsTest, AttendSurvivesScoresThatFloatsCannotExponentiate) {
  Head head(DType::kBFloat16, 100, 1, 1);
  auto* tile = reinterpret_cast<std::uint16_t*>(head.store.blocks(0)[0]);
  tile[50] = to_bfloat16(1e20F);  // its weight is 1, all others are 0
  tile[kTileRows + 50] = to_bfloat16(3.0F);
  Queries queries;
  queries.query = {1.0F, -1.0F};
  queries.first = {0, 50};
  queries.last = {100, 51};
  EXPECT_THAT(queries.run(head, true), ::testing::ElementsAre(3.0F, 3.0F));
}

}  // namespace
}  // namespace qfilters
