#include "qfilters/isa.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include "qfilters/attention.h"

#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::Contents;
using test::error_of;
using test::IsError;
using test::Model;

class IsaTest : public ::testing::Test {
 protected:
  void TearDown() override { set_isa("auto"); }
};

TEST_F(IsaTest, NamesEachOnceWithScalarLast) {
  auto names = runnable_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "scalar");
  for (const std::string& name : names) {
    EXPECT_TRUE(std::ranges::none_of(name, [](char c) {
      return c >= 'A' && c <= 'Z';
    })) << name;
  }
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end());
}

TEST_F(IsaTest, RunsOnTheBestUntilAnotherIsChosenAndAgainOnAuto) {
  const auto names = runnable_isas();
  EXPECT_EQ(active_isa(), names.front());
  for (const char* automatic : {"auto", ""}) {
    for (const std::string& name : names) {
      set_isa(name);
      EXPECT_EQ(active_isa(), name);
      EXPECT_EQ(runnable_isas(), names);
    }
    set_isa(automatic);
    EXPECT_EQ(active_isa(), names.front());
  }
}

TEST_F(IsaTest, AnImpossibleNameIsAnErrorThatListsTheOthers) {
  set_isa("scalar");
  for (const char* name : {"nonsense", "SCALAR", "best", "avx2 ", "neon,"}) {
    const auto error = error_of([&] { set_isa(name); });
    EXPECT_THAT(error, IsError(ErrorKind::kInvalidArgument, name));
    for (const std::string& each : runnable_isas()) {
      EXPECT_THAT(error, IsError(ErrorKind::kInvalidArgument, each));
    }
    EXPECT_EQ(active_isa(), "scalar");
  }
}

TEST_F(IsaTest, TheChoiceOutlivesOtherUsersOfHighway) {
  set_isa("scalar");
  EXPECT_NE(hwy::SupportedTargets(), 0);
  EXPECT_EQ(active_isa(), "scalar");
}

// Attention of the model's first layer over `tokens` stored rows.
std::vector<std::uint32_t> attention_bits(const Model& model) {
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {100});
  model.append(cache, 5);
  const LayerShape& shape = model.layers[0];
  const auto queries =
      test::random_floats(3, 1, shape.kv_heads, 5, shape.key_dim);
  std::vector<float> out(shape.kv_heads * 5 * shape.value_dim);
  attend(
      queries.view(),
      cache.rows(0),
      {},
      OutputView::dense(out.data(), 1, shape.kv_heads, 5, shape.value_dim));
  return test::bits_of(out);
}

// Fused multiply-adds round once, plain C++ twice: what set_isa() says shows in
// a kernel of another file.
TEST_F(IsaTest, TheChoiceReachesTheKernelsAndCanBeTakenBack) {
  const auto names = runnable_isas();
  if (!std::ranges::count(names, "avx2")) GTEST_SKIP() << "nothing here fuses";
  const Model model({{2, 64, 64, 0}});
  set_isa("avx2");
  const auto fused = attention_bits(model);
  set_isa("scalar");
  const auto plain = attention_bits(model);
  EXPECT_NE(fused, plain);
  set_isa("avx2");
  EXPECT_EQ(attention_bits(model), fused);
  set_isa("scalar");
  EXPECT_EQ(attention_bits(model), plain);
}

// Heads whose dimension is no multiple of a vector, tied scores, rows of NaN
// and of infinity.
Model awkward_model(DType dtype) {
  Model model(
      {{2, 64, 64, 0},
       {3, 80, 24, 0},
       {1, 96, 96, 0},
       {2, 128, 40, 0},
       {2, 17, 17, 0}},
      1,
      dtype);
  const auto nan = test::encode(dtype, test::kNaN);
  const auto infinity = test::encode(dtype, test::kInfinity);
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    for (std::size_t h = 0; h < model.layers[l].kv_heads; ++h) {
      for (std::size_t t = 7; t < test::kModelTokens; ++t) {
        const auto row = model.keys[l].row(0, h, t);
        if (t % 3 == 0) {
          std::ranges::copy(model.keys[l].row(0, h, t - 7), row.begin());
        } else if (t % 41 == h) {
          row[t % row.size()] = t % 2 == 0 ? nan : infinity;
        }
      }
    }
  }
  return model;
}

// A stream under eviction: prefill in chunks, then single tokens. Any NaN
// score equals any other.
Contents run_stream(const Model& model, int threads) {
  SequenceOptions options = model.options();
  options.threads = threads;
  SequenceCache cache(
      model.layers,
      test::qfilters_policy(model, test::budget(70, 4, 16, 8)),
      options);
  auto sizes = test::chunks(280, 48);
  sizes.insert(sizes.end(), test::kModelTokens - 280, 1);
  model.feed(cache, sizes);
  Contents out = test::contents_of(cache);
  for (auto& layer : out.layers) {
    for (auto& group : layer) {
      for (std::uint32_t& bits : group.scores) {
        if (std::isnan(std::bit_cast<float>(bits))) bits = 0x7FC00000U;
      }
    }
  }
  return out;
}

TEST_F(IsaTest, KeepsTheSameRowsWithTheSameScoresOnEveryIsaAndThreadCount) {
  for (const auto& [dtype, format] :
       {std::pair(DType::kFloat16, RowFormat::kSame),
        {DType::kBFloat16, RowFormat::kSame},
        {DType::kFloat16, RowFormat::kInt8},
        {DType::kBFloat16, RowFormat::kInt8}}) {
    Model model = awkward_model(dtype);
    model.format = format;
    set_isa("scalar");
    const Contents want = run_stream(model, 1);
    ASSERT_LT(want.layers[0][0].positions.size(), 80U);
    for (const std::string& isa : runnable_isas()) {
      set_isa(isa);
      for (const int threads : {1, 2, 7}) {
        EXPECT_TRUE(run_stream(model, threads) == want)
            << isa << ", " << threads << " threads, " << to_string(dtype) << " "
            << to_string(format);
      }
    }
  }
}

}  // namespace
}  // namespace qfilters
