// The kernels that store rows, on every instruction set that this machine can
// run.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/isa.h"

#include "kernels/move_rows.h"
#include "kernels/quantize_row.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using kernels::kTileRows;

using test::HalfTensor;
using test::random_halves;

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

class RowKernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    set_isa(GetParam());
    ASSERT_EQ(active_isa(), GetParam());
  }

  void TearDown() override { set_isa("auto"); }
};

INSTANTIATE_TEST_SUITE_P(
    EachIsa,
    RowKernelsTest,
    ::testing::ValuesIn(runnable_isas()),
    [](const auto& isa) { return isa.param; });

std::vector<std::uint16_t> halves_of(
    DType dtype, const std::vector<float>& row) {
  std::vector<std::uint16_t> out;
  for (const float x : row)
    out.push_back(test::encode(dtype, x));
  return out;
}

// Quantizes a row into every `stride`-th place and compares with the rule.
void expect_quantized(
    DType dtype, std::span<const std::uint16_t> row, std::size_t stride) {
  constexpr std::int8_t kUntouched = 77;
  const auto want = test::reference_quantized(dtype, row);
  std::vector<std::int8_t> out(row.size() * stride, kUntouched);
  const float scale = kernels::quantize_row(
      row.data(), row.size(), half_of(dtype), out.data(), stride);
  if (std::isnan(want.scale)) {
    EXPECT_TRUE(std::isnan(scale)) << scale;
  } else {
    EXPECT_EQ(scale, want.scale);
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(out[i], i % stride == 0 ? want.elements[i / stride] : kUntouched)
        << "element " << i / stride << " of " << row.size();
  }
}

TEST_P(RowKernelsTest, QuantizeRowGivesTheBitsOfTheRule) {
  for (const DType dtype : kHalves) {
    for (const std::size_t dim :
         {1U, 2U, 7U, 8U, 15U, 16U, 17U, 31U, 32U, 33U, 64U, 80U, 127U, 256U}) {
      const HalfTensor rows = random_halves(dim, dtype, 1, 1, 20, dim, 1);
      for (std::size_t t = 0; t < 20; ++t) {
        expect_quantized(dtype, rows.row(0, 0, t), 1);
        expect_quantized(dtype, rows.row(0, 0, t), kTileRows);
      }
    }
  }
}

TEST_P(RowKernelsTest, QuantizeRowTakesEveryHalf) {
  for (const DType dtype : kHalves) {
    // Each 16-bit pattern beside a one and a zero, at changing places.
    for (std::size_t bits = 0; bits < 65536; ++bits) {
      std::vector<std::uint16_t> row(19);
      row[(bits + 5) % 19] = test::encode(dtype, 1.0F);
      row[bits % 19] = static_cast<std::uint16_t>(bits);
      expect_quantized(dtype, row, 1);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(RowKernelsTest, QuantizeRowRoundsTiesToEvenAndKeepsTheLargest) {
  for (const DType dtype : kHalves) {
    const auto row =
        halves_of(dtype, {127, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -127, 3, -0.0F});
    std::vector<std::int8_t> out(row.size());
    EXPECT_EQ(
        kernels::quantize_row(
            row.data(), row.size(), half_of(dtype), out.data(), 1),
        1.0F);
    EXPECT_THAT(out, ::testing::ElementsAre(127, 0, 2, 2, 0, -2, -127, 3, 0));
  }
}

// Any run of rows within a tile or from one tile to another, by its slots.
// `scales` floats a row follow the elements of a tile.
template <typename T>
void expect_moved_rows(
    void (*move)(const kernels::RowMove&, std::size_t, std::size_t) noexcept,
    std::size_t scales) {
  for (const auto& [key_dim, value_dim] :
       {std::pair<std::size_t, std::size_t>{64, 64}, {80, 48}, {1, 3}}) {
    const std::size_t elements = kTileRows * (key_dim + value_dim);
    const std::size_t tile =
        elements + kTileRows * scales * sizeof(float) / sizeof(T);
    const auto value_of = [&](std::size_t i) {
      return static_cast<T>(i * 40503U >> 3U);
    };
    for (std::size_t count = 1; count <= kTileRows; ++count) {
      for (const std::size_t from :
           {kTileRows - count, (kTileRows - count) / 2}) {
        for (const std::size_t to : {std::size_t{0}, from / 2, from}) {
          for (const bool same : {true, false}) {
            std::vector<T> source(tile);
            for (std::size_t i = 0; i < tile; ++i)
              source[i] = value_of(i);
            std::vector<T> target(tile, 7);
            auto& into = same ? source : target;
            std::vector<T> want = into;
            // `width` elements of each row from `first` on.
            const auto want_rows = [&](std::size_t first, std::size_t width) {
              for (std::size_t i = 0; i < count * width; ++i) {
                want[first + to * width + i] =
                    value_of(first + from * width + i);
              }
            };
            for (std::size_t d = 0; d < key_dim; ++d)
              want_rows(d * kTileRows, 1);
            want_rows(key_dim * kTileRows, value_dim);
            constexpr std::size_t kScale = sizeof(float) / sizeof(T);
            for (std::size_t i = 0; i < scales; ++i)
              want_rows(elements + i * kTileRows * kScale, kScale);
            move(
                {reinterpret_cast<const std::uint16_t*>(source.data()),
                 reinterpret_cast<std::uint16_t*>(into.data()),
                 from,
                 to,
                 count},
                key_dim,
                value_dim);
            ASSERT_EQ(into, want) << key_dim << ": " << count << " rows from "
                                  << from << " to " << to << same;
          }
        }
      }
    }
  }
}

TEST_P(RowKernelsTest, MoveRowsMovesTheRowsAndNothingElse) {
  expect_moved_rows<std::uint16_t>(kernels::move_rows, 0);
}

TEST_P(RowKernelsTest, MoveInt8RowsMovesTheRowsTheirScalesAndNothingElse) {
  expect_moved_rows<std::uint8_t>(kernels::move_int8_rows, 2);
}

}  // namespace
}  // namespace qfilters
