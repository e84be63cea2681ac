// What a merger makes of the values of rows that go.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/merging.h"
#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::budget;
using test::Contents;
using test::contents_of;
using test::error_of;
using test::IsError;
using test::Model;

// Of every row that goes a quarter of the value to each of the next three rows
// that stay, and of every other one something to the very first.
class PlainMerger final : public Merger {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "plain";
  }

  [[nodiscard]] std::string identity() const override { return "plain"; }

  void merge(const MergeInput& in, std::vector<Merge>& out) const override {
    EXPECT_TRUE(std::ranges::is_sorted(in.positions));
    EXPECT_EQ(in.scores.size(), in.positions.size());
    for (std::uint32_t row = 0; row < in.positions.size(); ++row) {
      const auto next = std::ranges::lower_bound(in.kept, row);
      if (next != in.kept.end() && *next == row) continue;
      const auto first = static_cast<std::uint32_t>(next - in.kept.begin());
      const auto behind = static_cast<std::uint32_t>(in.kept.size()) - first;
      out.push_back({row, first, std::min(3U, behind), 0.25F});
      if (in.positions[row] % 2 == 0) out.push_back({row, 0, 1, 0.125F});
    }
  }
};

// A global layer of two heads and a windowed one.
Model make_model(RowFormat format, DType dtype) {
  Model model({{2, 16, 24, 0}, {1, 8, 8, 70}}, 2, dtype);
  model.format = format;
  return model;
}

const Model& model() {
  static const Model model = make_model(RowFormat::kSame, DType::kFloat16);
  return model;
}

PolicyOptions merging(PolicyOptions options) {
  options.merger = std::make_shared<const PlainMerger>();
  return options;
}

Policy knorm(const PolicyOptions& options) {
  return Policy::make("knorm", options);
}

SequenceCache cache_of(const Model& model, const Policy& policy) {
  return {model.layers, policy, model.options()};
}

std::uint16_t half(DType dtype, float value) {
  return dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
}

// The same spelled out for one head: rows by position, oldest first. Which
// rows stay is taken from a cache without a merger.
struct SlowHead {
  std::map<std::int32_t, std::vector<float>> values;

  void step(
      const Model& model,
      std::size_t group,
      std::size_t from,
      std::size_t count,
      const std::vector<std::int32_t>& kept) {
    for (std::size_t t = from; t < from + count; ++t) {
      const auto row = model.values[0].row(group / 2, group % 2, t);
      auto& value = values[static_cast<std::int32_t>(t)];
      for (const auto x : row)
        value.push_back(static_cast<float>(test::decode(model.dtype, x)));
    }
    std::map<std::int32_t, std::vector<float>> sums;
    const auto give = [&](std::int32_t to, const auto& value, float weight) {
      auto& sum = sums[to];
      sum.resize(value.size());
      for (std::size_t d = 0; d < sum.size(); ++d)
        sum[d] += weight * value[d];
    };
    for (const auto& [position, value] : values) {
      if (std::ranges::count(kept, position) != 0) continue;
      int left = 3;
      for (const std::int32_t to : kept) {
        if (to > position && left-- > 0) give(to, value, 0.25F);
      }
      if (position % 2 == 0) give(kept.front(), value, 0.125F);
    }
    std::erase_if(values, [&](const auto& row) {
      return std::ranges::count(kept, row.first) == 0;
    });
    for (const auto& [to, sum] : sums) {
      for (std::size_t d = 0; d < sum.size(); ++d) {
        const float moved = values[to][d] + sum[d];
        values[to][d] = static_cast<float>(
            test::decode(model.dtype, half(model.dtype, moved)));
      }
    }
  }
};

TEST(SequenceMergingTest, AddsValuesAsASlowComputationDoes) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const auto& sizes :
         {std::vector<std::size_t>{90, 1, 1, 40, 3},
          std::vector<std::size_t>{7, 64, 65, 1, 1, 1}}) {
      const Model model = make_model(RowFormat::kSame, dtype);
      const PolicyOptions options = budget(20, 2, 5, 2);
      SequenceCache plain = cache_of(model, knorm(options));
      SequenceCache cache = cache_of(model, knorm(merging(options)));
      std::vector<SlowHead> slow(4);
      for (const std::size_t count : sizes) {
        const std::size_t from = plain.offset();
        model.feed(plain, {count});
        model.feed(cache, {count});
        for (std::size_t g = 0; g < slow.size(); ++g) {
          const auto kept = plain.store(0).positions(g);
          slow[g].step(model, g, from, count, {kept.begin(), kept.end()});
          std::vector<std::uint16_t> row(24);
          for (std::size_t r = 0; r < kept.size(); ++r) {
            cache.store(0).read_value(g, r, row.data());
            for (std::size_t d = 0; d < row.size(); ++d) {
              ASSERT_EQ(
                  static_cast<float>(test::decode(dtype, row[d])),
                  slow[g].values[kept[r]][d])
                  << "head " << g << " row " << r << " of " << kept.size();
            }
          }
        }
      }
    }
  }
}

// Everything but values.
Contents without_values(const SequenceCache& cache) {
  Contents out = contents_of(cache);
  for (std::size_t l = 0; l < out.layers.size(); ++l) {
    const LayerShape& shape = cache.layer_shape(l);
    for (auto& group : out.layers[l]) {
      const std::size_t width = shape.key_dim + shape.value_dim;
      for (std::size_t at = shape.key_dim; at < group.rows.size(); at += width)
        std::fill_n(&group.rows[at], shape.value_dim, std::uint16_t{0});
    }
  }
  return out;
}

TEST(SequenceMergingTest, LeavesKeysPositionsAndScoresAlone) {
  for (const RowFormat format : {RowFormat::kSame, RowFormat::kInt8}) {
    const Model model = make_model(format, DType::kFloat16);
    for (const BudgetRule rule : {BudgetRule::kUniform, BudgetRule::kShared}) {
      PolicyOptions options = budget(20, 2, 5, 4);
      options.rule = rule;
      SequenceCache plain = cache_of(model, knorm(options));
      SequenceCache cache = cache_of(model, knorm(merging(options)));
      for (const std::size_t count : {90U, 1U, 30U, 5U, 1U, 1U, 1U}) {
        model.feed(plain, {count});
        model.feed(cache, {count});
        EXPECT_EQ(without_values(cache), without_values(plain));
      }
      EXPECT_NE(contents_of(cache).layers[0], contents_of(plain).layers[0]);
      EXPECT_EQ(contents_of(cache).layers[1], contents_of(plain).layers[1]);
    }
  }
}

TEST(SequenceMergingTest, ThreadsAndRowOrderChangeNothing) {
  const PolicyOptions options = merging(budget(20, 2, 5));
  const auto rows = [&](int threads, RowOrder order) {
    SequenceOptions how = model().options();
    how.threads = threads;
    how.order = order;
    SequenceCache cache(model().layers, knorm(options), how);
    model().feed(cache, {90, 1, 1, 1, 30, 1});
    return test::in_temporal_order(cache);
  };
  const Contents wanted = rows(1, RowOrder::kTemporal);
  EXPECT_EQ(rows(3, RowOrder::kTemporal), wanted);
  EXPECT_EQ(rows(1, RowOrder::kSlot), wanted);
}

TEST(SequenceMergingTest, RowsThatWereOnceInSlotsMergeInTemporalOrder) {
  SequenceOptions slots = model().options();
  slots.order = RowOrder::kSlot;
  SequenceCache shuffled(model().layers, knorm(budget(20, 2, 5)), slots);
  SequenceCache ordered = cache_of(model(), knorm(budget(20, 2, 5)));
  for (SequenceCache* cache : {&shuffled, &ordered}) {
    model().feed(*cache, std::vector<std::size_t>(60, 1));
    cache->set_policy(knorm(merging(budget(16, 2, 5))));
    model().feed(*cache, {9, 1});
  }
  EXPECT_EQ(test::in_temporal_order(shuffled), contents_of(ordered));
}

TEST(SequenceMergingTest, AValueThatWouldOverflowStays) {
  Model big = make_model(RowFormat::kSame, DType::kFloat16);
  const std::uint16_t most = half(DType::kFloat16, 60000);
  for (auto& x : big.values[0].data())
    x = most;
  SequenceCache cache = cache_of(big, knorm(merging(budget(20, 2, 5))));
  big.feed(cache, {60});
  test::expect_true_rows(cache, big);
}

TEST(SequenceMergingTest, ACommitWithoutMemoryLeavesValuesAlone) {
  SequenceOptions options = model().options();
  // A block for each head, of 64 rows; then the windowed layer needs another.
  options.byte_limit = 2 * 2 * (2 * 64 * 40 + 64 * 16) + 100;
  SequenceCache cache(
      model().layers, knorm(merging(budget(20, 2, 5))), options);
  model().feed(cache, {50});
  const Contents before = contents_of(cache);
  model().append(cache, 30);
  EXPECT_THAT(
      error_of([&] { cache.commit(); }), IsError(ErrorKind::kMemoryLimit, ""));
  EXPECT_EQ(contents_of(cache), before);
}

// Says the same thing whatever is asked.
class WrongMerger final : public Merger {
 public:
  explicit WrongMerger(const Merge& merge) : merge_(merge) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "wrong";
  }

  [[nodiscard]] std::string identity() const override { return "wrong"; }

  void merge(const MergeInput& /*in*/, std::vector<Merge>& out) const override {
    out.push_back(merge_);
  }

 private:
  Merge merge_;
};

TEST(SequenceMergingTest, AMergerMayNotNameOtherRowsThanItWasGiven) {
  constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();
  // Of 60 rows 20 stay, the first and the last among them.
  for (const Merge& merge :
       {Merge{60, 0, 1, 1},
        Merge{kMost, 0, 1, 1},
        Merge{0, 0, 1, 1},
        Merge{59, 0, 1, 1},
        Merge{30, 20, 1, 1},
        Merge{30, 0, 21, 1},
        Merge{30, kMost, 2, 1},
        Merge{30, 2, kMost, 1}}) {
    PolicyOptions options = budget(20, 2, 5);
    options.merger = std::make_shared<const WrongMerger>(merge);
    const Policy policy = Policy::make("streaming", options);
    for (const RowOrder order : {RowOrder::kTemporal, RowOrder::kSlot}) {
      SequenceOptions how = model().options();
      how.order = order;
      SequenceCache cache(model().layers, policy, how);
      model().feed(cache, {15});
      const Contents before = contents_of(cache);
      model().append(cache, 45);
      EXPECT_THAT(
          error_of([&] { cache.commit(); }),
          IsError(
              ErrorKind::kInvalidArgument,
              "merger wrong gives row " + std::to_string(merge.evicted) +
                  " of 60 to rows " + std::to_string(merge.first)));
      EXPECT_TRUE(cache.open());
      EXPECT_EQ(contents_of(cache), before);
    }
  }
}

TEST(SequenceMergingTest, EvictingBetweenMicroBatchesMergesAsACommitDoes) {
  for (const BudgetRule rule : {BudgetRule::kUniform, BudgetRule::kShared}) {
    PolicyOptions options = merging(budget(20, 2, 5));
    options.rule = rule;
    SequenceCache at_once = cache_of(model(), knorm(options));
    options.interval = 100;
    SequenceCache later = cache_of(model(), knorm(options));
    for (const std::size_t count : {60U, 30U}) {
      model().feed(at_once, {count});
      model().feed(later, {count});
      later.evict();
      EXPECT_EQ(contents_of(later), contents_of(at_once));
    }
  }
}

TEST(SequenceMergingTest, AnEvictionThatAMergerFailsChangesNothing) {
  PolicyOptions options = budget(20, 2, 5, 100);
  options.merger = std::make_shared<const WrongMerger>(Merge{0, 0, 1, 1});
  SequenceCache cache = cache_of(model(), Policy::make("streaming", options));
  model().feed(cache, {60});
  const Contents before = contents_of(cache);
  EXPECT_THAT(
      error_of([&] { cache.evict(); }),
      IsError(ErrorKind::kInvalidArgument, "merger wrong gives row 0 of 60"));
  EXPECT_EQ(contents_of(cache), before);
  cache.set_policy(Policy::make("streaming", budget(20, 2, 5)));
  model().feed(cache, {1});
  test::expect_true_rows(cache, model());
}

TEST(SequenceMergingTest, NoRowsAreNothingToMergeInto) {
  for (const Merge& merge : {Merge{30, 20, 0, 1}, Merge{30, 3, 0, 1}}) {
    PolicyOptions options = budget(20, 2, 5);
    SequenceCache plain = cache_of(model(), Policy::make("streaming", options));
    options.merger = std::make_shared<const WrongMerger>(merge);
    SequenceCache cache = cache_of(model(), Policy::make("streaming", options));
    model().feed(plain, {60});
    model().feed(cache, {60});
    EXPECT_EQ(contents_of(cache), contents_of(plain));
  }
}

TEST(SequenceMergingTest, ASavedSequenceGoesOnWithTheSameMergerOnly) {
  const PolicyOptions options = budget(20, 2, 5);
  SequenceCache cache = cache_of(model(), knorm(merging(options)));
  model().feed(cache, {60});
  const Snapshot saved = cache.save();
  SequenceCache same = cache_of(model(), knorm(merging(options)));
  same.restore(saved);
  model().feed(same, {30});
  model().feed(cache, {30});
  EXPECT_EQ(contents_of(same), contents_of(cache));
  SequenceCache plain = cache_of(model(), knorm(options));
  EXPECT_THAT(
      error_of([&] { plain.restore(saved); }),
      IsError(ErrorKind::kMismatch, "'merger plain'"));
}

TEST(SequenceMergingTest, AMergerOfAttentionNeedsAScorerOfAttention) {
  PolicyOptions options = budget(20, 2, 5);
  options.merger = make_cam_merger();
  EXPECT_THAT(
      error_of([&] { (void)knorm(options); }),
      IsError(
          ErrorKind::kInvalidArgument,
          "merger cam weighs by attention, which knorm does not look at"));
}

}  // namespace
}  // namespace qfilters
