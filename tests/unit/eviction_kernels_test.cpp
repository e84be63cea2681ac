// Scoring, selecting and compacting against plain scalar references, on every
// instruction set that this machine can run: head dimensions of real models and
// odd ones, counts of rows around vectors and blocks, memory laid out in any
// way.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/isa.h"
#include "qfilters/kv_store.h"
#include "qfilters/scoring.h"
#include "qfilters/selection.h"

#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::bits_of;
using test::canonical_score;

constexpr std::size_t kHeads = 2;
constexpr std::size_t kDims[] = {
    64, 80, 96, 128, 256, 1, 7, 15, 16, 17, 33, 100, 127};
constexpr std::size_t kTokens[] = {
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130};

// How rows lie in memory; an odd shift or padding leaves rows that are aligned
// to two bytes only.
struct Layout {
  const char* name;
  std::size_t shift;    // elements before the first row
  std::size_t padding;  // after each row
  bool heads_inside;    // [tokens, heads, dim], else [heads, tokens, dim]
  bool backwards;       // tokens lie in descending order
};

constexpr Layout kLayouts[] = {
    {"dense", 0, 0, false, false},
    {"shifted", 1, 0, false, false},
    {"odd strides", 0, 1, false, false},
    {"wide strides", 3, 13, false, false},
    {"heads inside", 1, 0, true, false},
    {"backwards", 1, 2, false, true},
};

// Random rows, some of them twice so that scores tie, among NaN.
class Rows {
 public:
  Rows(const Layout& layout, DType dtype, std::size_t tokens, std::size_t dim)
      : memory_(layout.shift + kHeads * tokens * (dim + layout.padding), kNaN) {
    const auto step = static_cast<std::ptrdiff_t>(dim + layout.padding);
    const auto count = static_cast<std::ptrdiff_t>(tokens);
    const auto heads = static_cast<std::ptrdiff_t>(kHeads);
    view_ = TensorView::dense(
        memory_.data() + layout.shift, dtype, 1, kHeads, tokens, dim);
    view_.batch_stride = heads * count * step;
    view_.head_stride = layout.heads_inside ? step : count * step;
    view_.token_stride = layout.heads_inside ? heads * step : step;
    if (layout.backwards) {
      view_.data = view_.row(0, 0, tokens - 1);
      view_.token_stride = -view_.token_stride;
    }
    test::Random random(dim * 1000 + tokens);
    for (std::size_t h = 0; h < kHeads; ++h) {
      for (std::size_t t = 0; t < tokens; ++t) {
        const auto to = writable(h, t);
        if (t >= 5 && t % 3 == 0) {
          std::ranges::copy(row(h, t - 5), to.begin());
        } else {
          std::ranges::generate(
              to, [&] { return test::encode(dtype, random.normal()); });
        }
      }
    }
  }

  [[nodiscard]] const TensorView& view() const { return view_; }

  [[nodiscard]] std::span<const std::uint16_t> row(
      std::size_t head, std::size_t token) const {
    return {
        static_cast<const std::uint16_t*>(view_.row(0, head, token)),
        view_.dim};
  }

 private:
  static constexpr std::uint16_t kNaN = 0x7FFF;  // in either type

  std::span<std::uint16_t> writable(std::size_t head, std::size_t token) {
    return std::span(memory_).subspan(
        static_cast<std::size_t>(row(head, token).data() - memory_.data()),
        view_.dim);
  }

  std::vector<std::uint16_t> memory_;
  TensorView view_;
};

std::vector<float> reference_scores(
    const Rows& keys,
    std::size_t head,
    std::span<const float> filter,
    float sign) {
  std::vector<float> out;
  for (std::size_t t = 0; t < keys.view().tokens; ++t) {
    out.push_back(
        canonical_score(keys.view().dtype, keys.row(head, t), filter, sign));
  }
  return out;
}

std::vector<float> reference_norms(const Rows& keys, std::size_t head) {
  std::vector<float> out;
  for (std::size_t t = 0; t < keys.view().tokens; ++t) {
    std::vector<float> key;
    for (const std::uint16_t x : keys.row(head, t)) {
      key.push_back(test::decode(keys.view().dtype, x));
    }
    out.push_back(std::sqrt(
        canonical_score(keys.view().dtype, keys.row(head, t), key, 1)));
  }
  return out;
}

class EvictionKernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    set_isa(GetParam());
    ASSERT_EQ(active_isa(), GetParam());
  }

  void TearDown() override { set_isa("auto"); }

  // Calls `check(dtype, layout, tokens, dim)` for all of them.
  template <typename Check>
  static void for_each_case(Check&& check) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const Layout& layout : kLayouts) {
        for (const std::size_t tokens : kTokens) {
          for (const std::size_t dim : kDims) {
            SCOPED_TRACE(
                std::string(to_string(dtype)) + ", " + layout.name + ", " +
                std::to_string(tokens) + " rows of " + std::to_string(dim));
            check(dtype, layout, tokens, dim);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    EachIsa,
    EvictionKernelsTest,
    ::testing::ValuesIn(runnable_isas()),
    [](const auto& isa) { return isa.param; });

TEST_P(EvictionKernelsTest, ScoresAndNormsHaveTheBitsOfTheReference) {
  for_each_case([](DType dtype,
                   const Layout& layout,
                   std::size_t tokens,
                   std::size_t dim) {
    const auto filter = test::random_filter(dim, dim);
    const Rows keys(layout, dtype, tokens, dim);
    std::vector<float> out(tokens);
    for (std::size_t h = 0; h < kHeads; ++h) {
      for (const float sign : {1.0F, -1.0F}) {
        score_projection(keys.view(), 0, h, filter, sign, out);
        ASSERT_EQ(
            bits_of(out), bits_of(reference_scores(keys, h, filter, sign)));
      }
      key_norms(keys.view(), 0, h, out);
      ASSERT_EQ(bits_of(out), bits_of(reference_norms(keys, h)));
    }
  });
}

// Stores all rows of head 1 and evicts down to `keep` of them.
void expect_same_kept(
    const Rows& keys,
    const Rows& values,
    std::span<const float> filter,
    std::size_t keep) {
  const TensorView& view = keys.view();
  constexpr std::size_t kHead = 1;
  const Protection protection{keep / 4, keep / 3};
  std::vector<float> scores(view.tokens);
  score_projection(view, 0, kHead, filter, 1, scores);
  const auto kept = select_rows(scores, keep, protection);
  const auto reference = reference_scores(keys, kHead, filter, 1);
  ASSERT_EQ(kept, test::reference_selection(reference, keep, protection));

  RowPool pool;
  KVStore store(pool, {1, kHeads, view.dim, values.view().dim, view.dtype});
  std::vector<std::uint32_t> all(view.tokens);
  std::iota(all.begin(), all.end(), 0U);
  store.reserve(kHead, view.tokens);
  store.append(kHead, view, values.view(), all, 0, scores);
  store.keep(kHead, kept);
  ASSERT_EQ(store.rows(kHead), keep);
  std::vector<std::uint16_t> key(view.dim);
  std::vector<std::uint16_t> value(values.view().dim);
  for (std::size_t r = 0; r < keep; ++r) {
    store.read_key(kHead, r, key.data());
    store.read_value(kHead, r, value.data());
    ASSERT_TRUE(std::ranges::equal(key, keys.row(kHead, kept[r])));
    ASSERT_TRUE(std::ranges::equal(value, values.row(kHead, kept[r])));
    ASSERT_EQ(store.positions(kHead)[r], static_cast<std::int32_t>(kept[r]));
    ASSERT_EQ(store.scores(kHead)[r], reference[kept[r]]);
  }
}

TEST_P(EvictionKernelsTest, EvictionLeavesTheRowsOfTheReferenceUntouched) {
  for_each_case([](DType dtype,
                   const Layout& layout,
                   std::size_t tokens,
                   std::size_t dim) {
    const auto filter = test::random_filter(dim, dim);
    const Rows keys(layout, dtype, tokens, dim);
    const Rows values(layout, dtype, tokens, dim / 2 + 1);
    for (const std::size_t keep :
         {tokens, tokens - 1, tokens * 3 / 4, tokens / 2, tokens / 8}) {
      expect_same_kept(keys, values, filter, keep);
    }
  });
}

}  // namespace
}  // namespace qfilters
