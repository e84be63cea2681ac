// Policies that look at attention against a slow direct computation of the same
// in float64: scores and rows kept, micro-batch by micro-batch.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"

#include "policies/scorers.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::policies {
namespace {

using test::budget;
using test::error_of;
using test::FloatTensor;
using test::IsError;
using test::Model;
using test::two_layers;

constexpr std::size_t kShare = 2;  // query heads of a KV head

/// Rows of one head and what they are worth, in float64.
struct SlowHead {
  std::vector<std::int32_t> positions;
  std::vector<double> scores;
};

/// The heads of one layer under a policy that is spelled out.
class SlowLayer {
 public:
  using Attention = std::vector<std::vector<double>>;  // [group][row]
  using Observe = std::function<void(
      const Attention&, std::size_t group, std::size_t tokens, SlowHead&)>;
  using Rank = std::function<std::vector<double>(
      const SlowHead&, std::size_t tokens_seen)>;

  SlowLayer(const Model& model, std::size_t layer)
      : model_(model),
        layer_(layer),
        heads_(model.batch * model.layers[layer].kv_heads) {}

  [[nodiscard]] const std::vector<SlowHead>& heads() const { return heads_; }

  void step(
      const TensorView& queries,
      std::size_t last_queries,
      const Observe& observe) {
    const std::size_t tokens = queries.tokens;
    for (SlowHead& head : heads_) {
      for (std::size_t t = 0; t < tokens; ++t) {
        head.positions.push_back(static_cast<std::int32_t>(seen_ + t));
        head.scores.push_back(0);
      }
    }
    Attention attention;
    for (std::size_t g = 0; g < heads_.size(); ++g)
      attention.push_back(attend(queries, last_queries, g));
    for (std::size_t g = 0; g < heads_.size(); ++g)
      observe(attention, g, tokens, heads_[g]);
    seen_ += tokens;
  }

  void evict(const PolicyOptions& options, const Rank& rank) {
    for (SlowHead& head : heads_) {
      const std::size_t rows = head.positions.size();
      if (rows <= options.budget || rows < options.budget + options.interval)
        continue;
      const std::vector<double> exact = rank(head, seen_);
      const std::vector<float> scores(exact.begin(), exact.end());
      const auto kept =
          test::reference_selection(scores, options.budget, options.protection);
      SlowHead left;
      for (const std::uint32_t row : kept) {
        left.positions.push_back(head.positions[row]);
        left.scores.push_back(head.scores[row]);
      }
      head = std::move(left);
    }
  }

 private:
  [[nodiscard]] std::vector<double> attend(
      const TensorView& queries, std::size_t last, std::size_t group) const {
    const LayerShape& shape = model_.layers[layer_];
    const std::size_t tokens = queries.tokens;
    const SlowHead& head = heads_[group];
    std::vector<double> sums(head.positions.size());
    for (std::size_t t = last == 0 ? 0 : tokens - std::min(last, tokens);
         t < tokens;
         ++t) {
      for (std::size_t h = 0; h < kShare; ++h) {
        const auto* query = static_cast<const float*>(queries.row(
            group / shape.kv_heads, group % shape.kv_heads * kShare + h, t));
        std::vector<double> weights;
        double sum = 0;
        for (const std::int32_t position : head.positions) {
          if (static_cast<std::size_t>(position) > seen_ + t) break;
          const auto key = model_.keys[layer_].row(
              group / shape.kv_heads,
              group % shape.kv_heads,
              static_cast<std::size_t>(position));
          double dot = 0;
          for (std::size_t d = 0; d < key.size(); ++d)
            dot += double{query[d]} * test::decode(model_.dtype, key[d]);
          weights.push_back(
              std::exp(dot / std::sqrt(static_cast<double>(key.size()))));
          sum += weights.back();
        }
        for (std::size_t r = 0; r < weights.size(); ++r)
          sums[r] += weights[r] / sum;
      }
    }
    return sums;
  }

  const Model& model_;
  std::size_t layer_;
  std::vector<SlowHead> heads_;
  std::size_t seen_ = 0;
};

/// A scorer, and what it does in words of the slow side.
struct Case {
  std::string name;
  std::shared_ptr<const Scorer> scorer;
  std::size_t last_queries;
  SlowLayer::Observe observe;
  SlowLayer::Rank rank;
};

std::vector<double> as_they_are(const SlowHead& head, std::size_t /*seen*/) {
  return head.scores;
}

Case h2o() {
  return {
      "h2o",
      make_h2o_scorer(),
      0,
      [](const auto& attention, auto group, auto /*tokens*/, SlowHead& head) {
        for (std::size_t r = 0; r < head.scores.size(); ++r)
          head.scores[r] += attention[group][r];
      },
      as_they_are};
}

Case tova() {
  return {
      "tova",
      make_tova_scorer(),
      1,
      [](const auto& attention, auto group, auto /*tokens*/, SlowHead& head) {
        const std::size_t heads = attention.size() / two_layers().batch;
        const std::size_t first = group / heads * heads;
        for (std::size_t r = 0; r < head.scores.size(); ++r) {
          head.scores[r] = 0;
          for (std::size_t g = first; g < first + heads; ++g)
            head.scores[r] += attention[g][r];
        }
      },
      as_they_are};
}

Case snapkv(
    std::size_t window, std::size_t kernel, Pooling pooling = Pooling::kMax) {
  return {
      "snapkv_window" + std::to_string(window) + "_kernel" +
          std::to_string(kernel) + (pooling == Pooling::kMean ? "_mean" : ""),
      make_snapkv_scorer("snapkv", {window, kernel, pooling}),
      window,
      [=](const auto& attention, auto group, auto tokens, SlowHead& head) {
        const double share = static_cast<double>(std::min(tokens, window)) /
                             static_cast<double>(window);
        for (std::size_t r = 0; r < head.scores.size(); ++r) {
          head.scores[r] = head.scores[r] * (1 - share) + attention[group][r];
        }
      },
      [=](const SlowHead& head, std::size_t seen) {
        const auto in_window = [&](std::size_t r) {
          return static_cast<std::size_t>(head.positions[r]) + window >= seen;
        };
        std::vector<double> out = head.scores;
        for (std::size_t r = 0; r < out.size(); ++r) {
          double sum = 0;
          for (std::size_t n = 0; n < out.size(); ++n) {
            const std::size_t apart = n > r ? n - r : r - n;
            if (apart > kernel / 2 || in_window(r) || in_window(n)) continue;
            sum += head.scores[n];
            if (pooling == Pooling::kMax)
              out[r] = std::max(out[r], head.scores[n]);
          }
          if (pooling == Pooling::kMean && !in_window(r))
            out[r] = sum / static_cast<double>(kernel);
        }
        return out;
      }};
}

void PrintTo(const Case& c, std::ostream* os) {
  *os << c.name;
}

class AttentionPolicyTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionPolicyTest, KeepsScoresAndRowsOfASlowDirectComputation) {
  const Case& c = GetParam();
  const Model& model = two_layers();
  const PolicyOptions options = budget(48, 3, 6, 4);
  SequenceCache cache(
      model.layers, Policy::custom(c.scorer, options), model.options());
  std::vector<SlowLayer> slow;
  for (std::size_t l = 0; l < model.layers.size(); ++l)
    slow.emplace_back(model, l);
  std::uint64_t seed = 100;
  for (const std::size_t count :
       {20U, 21U, 5U, 40U, 1U, 1U, 1U, 9U, 70U, 3U, 30U, 4U}) {
    model.append(cache, count);
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
      const LayerShape& shape = model.layers[l];
      const std::size_t heads = shape.kv_heads * kShare;
      const FloatTensor queries =
          test::random_floats(++seed, model.batch, heads, count, shape.key_dim);
      FloatTensor out(
          DType::kFloat32, model.batch, heads, count, shape.value_dim);
      AttentionStatistics statistics;
      statistics.kind = cache.attention_needs(l).value().kind;
      statistics.last_queries = cache.attention_needs(l).value().last_queries;
      EXPECT_EQ(statistics.last_queries, c.last_queries);
      attend(
          queries.view(),
          cache.rows(l),
          {},
          OutputView::dense(
              out.data().data(), model.batch, heads, count, shape.value_dim),
          &statistics);
      cache.observe(l, statistics);
      slow[l].step(queries.view(), c.last_queries, c.observe);
      slow[l].evict(options, c.rank);
    }
    cache.commit();
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
      for (std::size_t g = 0; g < slow[l].heads().size(); ++g) {
        SCOPED_TRACE(
            "offset " + std::to_string(cache.offset()) + " layer " +
            std::to_string(l) + " group " + std::to_string(g));
        const SlowHead& want = slow[l].heads()[g];
        ASSERT_TRUE(
            std::ranges::equal(cache.store(l).positions(g), want.positions));
        // Far more than float32 loses on sums of a hundred probabilities.
        const auto got = cache.store(l).scores(g);
        for (std::size_t r = 0; r < got.size(); ++r)
          ASSERT_NEAR(got[r], want.scores[r], 1e-5 * (1 + want.scores[r]));
      }
    }
  }
  EXPECT_GT(cache.stats().evictions, 4U);
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    AttentionPolicyTest,
    ::testing::Values(
        h2o(),
        tova(),
        snapkv(16, 5),
        snapkv(4, 1),
        snapkv(8, 3),
        snapkv(8, 5, Pooling::kMean)),
    [](const auto& c) { return c.param.name; });

TEST(AttentionPolicyTest, ScoresNothingWhenRowsEnter) {
  const Model& model = two_layers();
  for (const auto& scorer :
       {make_h2o_scorer(), make_tova_scorer(), make_snapkv_scorer()}) {
    std::vector<float> scores(5, 1.0F);
    scorer->score({0, 0, 0, model.keys[0].slice(0, 5), 0}, scores);
    EXPECT_THAT(scores, ::testing::Each(0.0F));
    EXPECT_FALSE(scorer->frozen());
  }
}

TEST(AttentionPolicyTest, TovaLeavesOutHeadsThatHoldOtherRows) {
  const Model model({{3, 8, 8, 0}});
  SequenceCache cache(
      model.layers, Policy::make("random", budget(4, 0, 0)), model.options());
  model.feed(cache, {20});
  cache.set_policy(Policy::custom(make_tova_scorer(), budget(4, 0, 0)));
  model.append(cache, 1);
  ASSERT_FALSE(std::ranges::equal(
      cache.store(0).positions(0), cache.store(0).positions(1)));
  const std::vector<std::vector<float>> attention(3, {1, 2, 3, 4, 5});
  std::vector<float> scores(5, 9.0F);
  make_tova_scorer()->observe({0, 0, 1, cache.rows(0), attention}, scores);
  EXPECT_EQ(scores, attention[1]);
}

TEST(AttentionPolicyTest, SnapKvRefusesWhatIsNoWindowOrKernel) {
  for (const SnapOptions& bad : {SnapOptions{0, 7}, {32, 0}, {32, 6}}) {
    EXPECT_THAT(
        error_of([&] { (void)make_snapkv_scorer("snapkv", bad); }),
        IsError(ErrorKind::kInvalidArgument, "snapkv: window="));
  }
}

TEST(AttentionPolicyTest, SnapKvsOfOtherOptionsAreOthers) {
  EXPECT_NE(
      make_snapkv_scorer("snapkv", {32, 7})->identity(),
      make_snapkv_scorer("snapkv", {32, 5})->identity());
  EXPECT_NE(
      make_snapkv_scorer("snapkv", {32, 7})->identity(),
      make_snapkv_scorer("snapkv", {64, 7})->identity());
  EXPECT_NE(
      make_snapkv_scorer("snapkv", {32, 7})->identity(),
      make_snapkv_scorer("snapkv", {32, 7, Pooling::kMean})->identity());
}

}  // namespace
}  // namespace qfilters::policies
