// Attention on every instruction set that this machine can run, against a slow
// float64 reference, with inputs that are neither dense nor aligned.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/isa.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

constexpr std::size_t kPadding = 3;

// A tensor [1, heads, tokens, dim] laid out [token][head][dim + kPadding], one
// element past the alignment of its vector: rows start anywhere.
template <typename Element>
class Crooked {
 public:
  template <typename Make>
  Crooked(
      DType dtype,
      std::size_t heads,
      std::size_t tokens,
      std::size_t dim,
      Make&& make)
      : data_(tokens * heads * (dim + kPadding) + 1) {
    for (Element& x : data_)
      x = make();
    const auto row = static_cast<std::ptrdiff_t>(dim + kPadding);
    const auto token = static_cast<std::ptrdiff_t>(heads) * row;
    view_ = {data_.data() + 1, dtype, 1, heads, tokens, dim, 0, row, token};
  }

  [[nodiscard]] TensorView from(std::size_t first) const {
    TensorView out = view_;
    out.data = view_.row(0, 0, first);
    out.tokens = view_.tokens - first;
    return out;
  }

 private:
  std::vector<Element> data_;
  TensorView view_;
};

// Key dimension and value dimension; type; how rows are stored.
using Dims = std::pair<std::size_t, std::size_t>;
using Param = std::tuple<Dims, DType, RowFormat>;

class AttentionIsaTest : public ::testing::TestWithParam<Param> {
 protected:
  void TearDown() override { set_isa("auto"); }
};

// Two KV heads of two queries each: `tokens` new rows, the others stored.
void expect_agreement(
    const Param& param, std::size_t count, std::size_t tokens) {
  const auto [key_dim, value_dim] = std::get<0>(param);
  const DType dtype = std::get<1>(param);
  test::Random random(count);
  const auto half = [&] { return test::encode(dtype, random.normal()); };
  const Crooked<std::uint16_t> keys(dtype, 2, count, key_dim, half);
  const Crooked<std::uint16_t> values(dtype, 2, count, value_dim, half);
  const Crooked<float> queries(
      DType::kFloat32, 4, tokens, key_dim, [&] { return random.normal(); });
  RowPool pool;
  KVStore store(pool, {1, 2, key_dim, value_dim, dtype, std::get<2>(param)});
  const std::size_t stored = count - tokens;
  std::vector<std::uint32_t> which(stored);
  std::iota(which.begin(), which.end(), 0U);
  const std::vector<float> scores(stored);
  for (std::size_t g = 0; g < 2; ++g) {
    store.reserve(g, stored);
    store.append(g, keys.from(0), values.from(0), which, 0, scores);
  }
  const RowsView rows(
      store,
      keys.from(stored),
      values.from(stored),
      static_cast<std::int32_t>(stored));
  const test::ReferenceAttention reference{
      1.0 / std::sqrt(static_cast<double>(key_dim)), 0, 0};
  std::vector<test::Expected> want;
  std::vector<std::vector<double>> sums(2, std::vector<double>(count));
  for (std::size_t i = 0; i < 4 * tokens; ++i) {
    const auto* query = static_cast<const float*>(
        queries.from(0).row(0, i / tokens, i % tokens));
    const std::size_t group = i / tokens / 2;
    want.push_back(test::reference_query(
        {query, key_dim}, rows, group, i % tokens, reference));
    const auto seen = test::reference_weights(
        {query, key_dim}, rows, group, i % tokens, reference);
    for (std::size_t r = 0; r < seen.rows.size(); ++r)
      sums[group][seen.rows[r]] += seen.weights[r];
  }
  for (const std::string& isa : runnable_isas()) {
    set_isa(isa);
    // One element past the alignment, a gap after each row that stays.
    const std::size_t stride = value_dim + 1;
    std::vector<float> out(4 * tokens * stride + 1, -7.0F);
    const auto head = static_cast<std::ptrdiff_t>(tokens * stride);
    const OutputView to{
        out.data() + 1,
        1,
        4,
        tokens,
        value_dim,
        0,
        head,
        static_cast<std::ptrdiff_t>(stride)};
    AttentionStatistics statistics;
    attend(queries.from(0), rows, {}, to, &statistics);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const float* const got = out.data() + 1 + i * stride;
      for (std::size_t d = 0; d < value_dim; ++d) {
        ASSERT_NEAR(got[d], want[i].value[d], want[i].bound[d])
            << isa << ", " << count << " rows, " << tokens << " new, query "
            << i << ", dim " << d;
      }
      ASSERT_EQ(got[value_dim], -7.0F) << isa;
    }
    ASSERT_EQ(out[0], -7.0F) << isa;
    for (std::size_t g = 0; g < 2; ++g) {
      for (std::size_t r = 0; r < count; ++r) {
        ASSERT_NEAR(statistics.rows[g][r], sums[g][r], 1e-4 * sums[g][r])
            << isa << ", " << count << " rows, group " << g << ", row " << r;
      }
    }
  }
}

TEST_P(AttentionIsaTest, DecodingAgreesWithFloat64) {
  // Around the lanes of each vector, the tile and the row block.
  for (const std::size_t rows :
       {1U, 2U, 3U, 5U, 7U, 9U, 15U, 17U, 63U, 64U, 65U, 1023U, 1024U, 1025U}) {
    expect_agreement(GetParam(), rows, 1);
  }
}

TEST_P(AttentionIsaTest, PrefillAgreesWithFloat64) {
  for (const std::size_t rows : {7U, 64U, 65U, 1027U}) {
    expect_agreement(GetParam(), rows, 7);
  }
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto& [dims, dtype, format] = info.param;
  return "key" + std::to_string(dims.first) + "value" +
         std::to_string(dims.second) + to_string(dtype) +
         (format == RowFormat::kInt8 ? "int8" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Dims,
    AttentionIsaTest,
    ::testing::Combine(
        ::testing::Values(
            Dims(64, 64),
            Dims(80, 80),
            Dims(96, 96),
            Dims(128, 128),
            Dims(256, 256),
            Dims(64, 80),
            Dims(80, 64),
            Dims(96, 256),
            Dims(128, 96),
            Dims(256, 64)),
        ::testing::Values(DType::kFloat16, DType::kBFloat16),
        ::testing::Values(RowFormat::kSame, RowFormat::kInt8)),
    name_of);

}  // namespace
}  // namespace qfilters
