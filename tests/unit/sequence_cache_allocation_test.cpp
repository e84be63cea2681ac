// Decoding at the budget allocates nothing: this program counts what it does.
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"

#include "unit/heap.h"
#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::budget;
using test::HalfTensor;
using test::Model;
using test::qfilters_policy;
using test::random_halves;

// A global and a windowed layer; rows of one token that differ in each step.
class Decoder {
 public:
  Decoder(const Model& model, const Policy& policy, int threads)
      : model_(model), cache_(model.layers, policy, options(model, threads)) {
    for (const LayerShape& shape : model.layers) {
      keys_.push_back(random_halves(
          keys_.size(),
          DType::kFloat16,
          model.options().batch,
          shape.kv_heads,
          kTokens,
          shape.key_dim));
      values_.push_back(random_halves(
          keys_.size() + 100,
          DType::kFloat16,
          model.options().batch,
          shape.kv_heads,
          kTokens,
          shape.value_dim));
      const std::size_t heads = model.options().batch * shape.kv_heads;
      queries_.emplace_back(heads * shape.key_dim, 0.1F);
      outs_.emplace_back(heads * shape.value_dim);
    }
    threads_ = threads;
  }

  void step() {
    cache_.begin(1);
    for (std::size_t l = 0; l < model_.layers.size(); ++l) {
      cache_.append(l, token(keys_[l]), token(values_[l]));
      const LayerShape& shape = model_.layers[l];
      const std::size_t batch = model_.options().batch;
      AttentionOptions options;
      options.window = shape.window;
      options.threads = threads_;
      attend(
          TensorView::dense(
              queries_[l].data(),
              DType::kFloat32,
              batch,
              shape.kv_heads,
              1,
              shape.key_dim),
          cache_.rows(l),
          options,
          OutputView::dense(
              outs_[l].data(), batch, shape.kv_heads, 1, shape.value_dim));
    }
    cache_.commit();
    next_ = (next_ + 1) % kTokens;
  }

  [[nodiscard]] const SequenceCache& cache() const { return cache_; }

 private:
  static constexpr std::size_t kTokens = 97;

  static SequenceOptions options(const Model& model, int threads) {
    SequenceOptions out = model.options();
    out.dtype = DType::kFloat16;
    out.threads = threads;
    return out;
  }

  [[nodiscard]] TensorView token(const HalfTensor& rows) const {
    TensorView view = rows.view();
    view.data = view.row(0, 0, next_);
    view.tokens = 1;
    return view;
  }

  const Model& model_;
  SequenceCache cache_;
  std::vector<HalfTensor> keys_;
  std::vector<HalfTensor> values_;
  std::vector<std::vector<float>> queries_;
  std::vector<std::vector<float>> outs_;
  std::size_t next_ = 0;
  int threads_ = 1;
};

// Until a round allocates nothing: a thread that gets its first work late, on a
// busy machine, makes its buffers then, and those that merge what threads find
// are made at position 1,024, which the first round passes.
void warm_up(Decoder& decoder) {
  for (int round = 0; round < 6; ++round) {
    const std::size_t before = test::heap().allocations;
    for (int i = 0; i < 1200; ++i)
      decoder.step();
    if (test::heap().allocations == before) return;
  }
}

void expect_no_allocations(RowFormat format) {
  Model model({{2, 24, 24, 0}, {1, 16, 8, 70}}, 2);
  model.format = format;
  for (const std::size_t interval : {0U, 16U}) {
    for (const int threads : {1, 2}) {
      Decoder decoder(
          model, qfilters_policy(model, budget(100, 4, 20, interval)), threads);
      warm_up(decoder);
      const std::size_t before = test::heap().allocations;
      const auto evictions = decoder.cache().stats().evictions;
      for (int i = 0; i < 400; ++i)
        decoder.step();
      EXPECT_EQ(test::heap().allocations.load(), before)
          << interval << " " << threads;
      EXPECT_GE(decoder.cache().stats().evictions, evictions + 20);
    }
  }
}

TEST(SequenceCacheAllocationTest, DecodingAtTheBudgetAllocatesNothing) {
  expect_no_allocations(RowFormat::kSame);
}

TEST(SequenceCacheAllocationTest, DecodingInt8RowsAllocatesNothing) {
  expect_no_allocations(RowFormat::kInt8);
}

// Threads share a head's rows from 1,025 on and merge what they find.
TEST(SequenceCacheAllocationTest, DecodingManyRowsAllocatesNothing) {
  Model model({{1, 24, 24, 0}});
  for (const auto format : {RowFormat::kSame, RowFormat::kInt8}) {
    model.format = format;
    for (const int threads : {1, 2}) {
      Decoder decoder(
          model, qfilters_policy(model, budget(1040, 4, 20, 16)), threads);
      warm_up(decoder);
      const std::size_t before = test::heap().allocations;
      for (int i = 0; i < 200; ++i)
        decoder.step();
      EXPECT_EQ(test::heap().allocations.load(), before)
          << to_string(format) << " " << threads;
    }
  }
}

// 2 groups of 1,000 rows in 16 blocks each, and what grows beside them.
TEST(SequenceCacheAllocationTest, GrowingRowByRowAllocatesNowAndThen) {
  const Model model({{1, 24, 24, 0}}, 2);
  Decoder decoder(model, Policy::full(), 1);
  const std::size_t before = test::heap().allocations;
  for (int i = 0; i < 1000; ++i)
    decoder.step();
  EXPECT_GT(test::heap().allocations.load(), before);
  EXPECT_LT(test::heap().allocations.load(), before + 250);
}

}  // namespace
}  // namespace qfilters
