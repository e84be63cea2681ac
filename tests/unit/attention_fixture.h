#pragma once

// One call of attend() with everything that it reads, and its float64 truth.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/attention.h"

#include "unit/test_util.h"

namespace qfilters::test {

/// The shapes of one call.
struct AttentionCase {
  std::size_t stored = 0;  // rows of the fullest group
  std::size_t tokens = 1;
  std::size_t key_dim = 64;
  std::size_t value_dim = 64;
  std::size_t batch = 1;
  std::size_t kv_heads = 2;
  std::size_t share = 2;  // query heads of a KV head
  DType dtype = DType::kFloat16;
  RowFormat format = RowFormat::kSame;
  bool ragged = false;  // group g holds every (g + 1)-th stored row
  AttentionOptions options = {};
};

inline std::string name_of(const AttentionCase& c) {
  std::string name =
      "stored" + std::to_string(c.stored) + "new" + std::to_string(c.tokens) +
      "dk" + std::to_string(c.key_dim) + "dv" + std::to_string(c.value_dim) +
      "b" + std::to_string(c.batch) + "h" + std::to_string(c.kv_heads) + "x" +
      std::to_string(c.share) + to_string(c.dtype);
  if (c.format == RowFormat::kInt8) name += "int8";
  if (c.ragged) name += "ragged";
  if (c.options.scale < 0) name += "minus";
  if (c.options.scale != 0) name += "scaled";
  if (c.options.soft_cap != 0) {
    name += "cap" + std::to_string(std::lround(c.options.soft_cap));
  }
  if (c.options.window != 0) name += "win" + std::to_string(c.options.window);
  return name;
}

inline void PrintTo(const AttentionCase& c, std::ostream* os) {
  *os << name_of(c);
}

/// The data of one call, owned.
class AttentionCall {
 public:
  explicit AttentionCall(const AttentionCase& c)
      : c_(c),
        store_(
            pool_,
            {c.batch, c.kv_heads, c.key_dim, c.value_dim, c.dtype, c.format}),
        keys_(random_halves(
            1,
            c.dtype,
            c.batch,
            c.kv_heads,
            c.stored + c.tokens,
            c.key_dim,
            3)),
        values_(random_halves(
            2,
            c.dtype,
            c.batch,
            c.kv_heads,
            c.stored + c.tokens,
            c.value_dim,
            5)),
        queries_(random_floats(
            3, c.batch, c.kv_heads * c.share, c.tokens, c.key_dim)) {
    const std::vector<float> scores(c.stored);
    for (std::size_t g = 0; g < store_.shape().groups(); ++g) {
      std::vector<std::uint32_t> which;
      for (std::size_t t = 0; t < c.stored; t += c.ragged ? g + 1 : 1) {
        which.push_back(static_cast<std::uint32_t>(t));
      }
      store_.reserve(g, which.size());
      store_.append(g, keys_.view(), values_.view(), which, 0, scores);
    }
  }

  [[nodiscard]] RowsView rows() const {
    return {
        store_,
        keys_.slice(c_.stored, c_.tokens),
        values_.slice(c_.stored, c_.tokens),
        static_cast<std::int32_t>(c_.stored)};
  }

  HalfTensor& keys() { return keys_; }

  HalfTensor& values() { return values_; }

  FloatTensor& queries() { return queries_; }

  [[nodiscard]] std::vector<float> run(
      int threads = 1, AttentionStatistics* statistics = nullptr) const {
    AttentionOptions options = c_.options;
    options.threads = threads;
    const std::size_t heads = c_.kv_heads * c_.share;
    std::vector<float> out(c_.batch * heads * c_.tokens * c_.value_dim);
    attend(
        queries_.view(),
        rows(),
        options,
        OutputView::dense(out.data(), c_.batch, heads, c_.tokens, c_.value_dim),
        statistics);
    return out;
  }

  [[nodiscard]] ReferenceAttention reference() const {
    const double scale = c_.options.scale != 0.0F
                             ? double{c_.options.scale}
                             : 1.0 / std::sqrt(static_cast<double>(c_.key_dim));
    return {scale, c_.options.soft_cap, c_.options.window};
  }

  void expect_agreement() const {
    const auto got = run();
    const std::size_t heads = c_.kv_heads * c_.share;
    const float* out = got.data();
    for (std::size_t b = 0; b < c_.batch; ++b) {
      for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t t = 0; t < c_.tokens; ++t, out += c_.value_dim) {
          const auto want = reference_query(
              queries_.row(b, h, t),
              rows(),
              b * c_.kv_heads + h / c_.share,
              t,
              reference());
          for (std::size_t d = 0; d < c_.value_dim; ++d) {
            ASSERT_NEAR(out[d], want.value[d], want.bound[d])
                << "batch " << b << " head " << h << " token " << t << " dim "
                << d;
          }
        }
      }
    }
  }

 private:
  AttentionCase c_;
  RowPool pool_;
  KVStore store_;
  HalfTensor keys_;
  HalfTensor values_;
  FloatTensor queries_;
};

}  // namespace qfilters::test
