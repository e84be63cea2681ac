#include "eval/tasks/fidelity.h"

#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/tasks/rank_correlation.h"
#include "policies/registry.h"
#include "unit/fake_capture.h"
#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::eval {
namespace {

using test::error_of;
using test::fake_capture;
using test::IsError;

constexpr std::size_t kContext = 120;
constexpr std::size_t kLater = 20;

const std::vector<LayerShape>& layers() {
  static const std::vector<LayerShape> shapes{
      {2, 16, 16, 0}, {2, 16, 16, 24}, {3, 24, 8, 0}};
  return shapes;
}

const llama::Capture& capture() {
  static const llama::Capture made =
      fake_capture(layers(), 2, kContext + kLater);
  return made;
}

FidelityResult measure(
    const Policy& policy, RowFormat format = RowFormat::kSame) {
  Replay replay(capture(), kContext);
  const Fidelity fidelity(replay);
  const auto cache = replay.one_shot(policy, format);
  FidelityResult result = fidelity.measure(policy, *cache);
  EXPECT_FALSE(cache->open());
  EXPECT_EQ(cache->offset(), kContext);
  return result;
}

Policy policy_of(const std::string& name, std::size_t budget) {
  return policies::make(name, test::budget(budget, 2, 4), nullptr, layers());
}

double value_of(const void* row, std::size_t d) {
  return static_cast<double>(
      test::decode(DType::kFloat16, static_cast<const std::uint16_t*>(row)[d]));
}

/// Attention of one later query over the rows that `sees` allows, in float64;
/// adds its probabilities to `paid`.
std::vector<double> slow_attention(
    std::size_t layer,
    std::size_t query_head,
    std::size_t later,
    const std::vector<bool>& kept,
    std::vector<double>& paid) {
  const LayerShape& shape = layers()[layer];
  const std::size_t head = query_head / 2;
  const std::size_t end = kContext + later + 1;
  const TensorView keys = capture().keys(layer, 0, end);
  const TensorView values = capture().values(layer, 0, end);
  const TensorView queries = capture().queries(layer, kContext + later, 1);
  const auto* const q =
      static_cast<const float*>(queries.row(0, query_head, 0));
  std::vector<double> weights(end);
  double sum = 0;
  for (std::size_t t = 0; t < end; ++t) {
    if (t < kContext && !kept[t]) continue;
    double dot = 0;
    for (std::size_t d = 0; d < shape.key_dim; ++d) {
      dot += static_cast<double>(q[d]) * value_of(keys.row(0, head, t), d);
    }
    weights[t] = std::exp(dot / std::sqrt(static_cast<double>(shape.key_dim)));
    sum += weights[t];
  }
  std::vector<double> out(shape.value_dim);
  for (std::size_t t = 0; t < end; ++t) {
    paid[t] += weights[t] / sum;
    for (std::size_t d = 0; d < out.size(); ++d) {
      out[d] += weights[t] / sum * value_of(values.row(0, head, t), d);
    }
  }
  return out;
}

TEST(FidelityTest, IsWhatAttentionInFloat64Says) {
  const Policy policy = policy_of("knorm", 40);
  Replay replay(capture(), kContext);
  const auto cache = replay.one_shot(policy, RowFormat::kSame);
  const FidelityResult result = measure(policy);
  for (const std::size_t l : {0U, 2U}) {
    for (std::size_t h = 0; h < layers()[l].kv_heads; ++h) {
      std::vector<bool> kept(kContext);
      for (const std::int32_t p : cache->store(l).positions(h)) {
        kept[static_cast<std::size_t>(p)] = true;
      }
      std::vector<double> paid(kContext + kLater);
      std::vector<double> unused(kContext + kLater);
      double difference = 0;
      double norm = 0;
      for (std::size_t q = 2 * h; q < 2 * h + 2; ++q) {
        for (std::size_t i = 0; i < kLater; ++i) {
          const auto all =
              slow_attention(l, q, i, std::vector<bool>(kContext, true), paid);
          const auto some = slow_attention(l, q, i, kept, unused);
          for (std::size_t d = 0; d < all.size(); ++d) {
            difference += (some[d] - all[d]) * (some[d] - all[d]);
            norm += all[d] * all[d];
          }
        }
      }
      EXPECT_NEAR(result.error[l][h], std::sqrt(difference / norm), 1e-5);
      const std::vector<float> future(paid.begin(), paid.begin() + kContext);
      EXPECT_NEAR(
          result.rank_correlation[l][h].value(),
          rank_correlation(replay.scores(policy, l)[h], future).value(),
          1e-3);
      EXPECT_EQ(result.rows[l][h], 40U);
    }
  }
}

TEST(FidelityTest, ErrorIsZeroWhereNothingIsMissing) {
  const FidelityResult full = measure(Policy::full());
  EXPECT_EQ(full.mean_error, 0);
  EXPECT_EQ(full.mean_rank_correlation, std::nullopt);
  EXPECT_EQ(full.rows[0][0], kContext);
  for (const char* name : {"knorm", "h2o", "snapkv"}) {
    const FidelityResult result = measure(policy_of(name, kContext + 50));
    for (const auto& layer : result.error) {
      EXPECT_THAT(layer, ::testing::Each(0.0));
    }
    EXPECT_TRUE(result.mean_rank_correlation.has_value());
  }
  EXPECT_GT(measure(policy_of("h2o", 40)).mean_error, 0.01);
  EXPECT_GT(measure(Policy::full(), RowFormat::kInt8).mean_error, 0);
}

TEST(FidelityTest, WindowedLayersAreWholeAndUnranked) {
  const FidelityResult result = measure(policy_of("random", 40));
  EXPECT_THAT(result.error[1], ::testing::Each(0.0));
  EXPECT_THAT(result.rank_correlation[1], ::testing::Each(std::nullopt));
  double sum = 0;
  for (const std::size_t l : {0U, 2U}) {
    for (const double error : result.error[l]) {
      sum += error;
    }
  }
  EXPECT_DOUBLE_EQ(result.mean_error, sum / 5);
}

TEST(FidelityTest, ChanceRanksNeitherWellNorBadly) {
  EXPECT_LT(
      std::abs(measure(policy_of("random", 40)).mean_rank_correlation.value()),
      0.2);
}

TEST(FidelityTest, RefusesWhatItCannotMeasure) {
  Replay all(capture(), kContext + kLater);
  EXPECT_THAT(
      error_of([&] { const Fidelity fidelity(all); }),
      IsError(ErrorKind::kInvalidArgument, "queries behind token 140"));
  Replay replay(capture(), kContext);
  const Fidelity fidelity(replay);
  SequenceCache other(layers(), Policy::full());
  EXPECT_THAT(
      error_of([&] { (void)fidelity.measure(Policy::full(), other); }),
      IsError(ErrorKind::kMismatch, "has read 0 tokens"));
  for (const FidelityOptions& bad :
       {FidelityOptions{0, 1}, FidelityOptions{1, 0}}) {
    EXPECT_THAT(
        error_of([&] { check_fidelity_options(bad); }),
        IsError(ErrorKind::kInvalidArgument, "each must be in 1.."));
  }
}

}  // namespace
}  // namespace qfilters::eval
