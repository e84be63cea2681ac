// Sizes that nobody has and memory that is not there: an error, and everything
// is as before. This program fails allocations at will.
#include "qfilters/limits.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/attention.h"
#include "qfilters/cache_builder.h"
#include "qfilters/calibrator.h"
#include "qfilters/error.h"
#include "qfilters/kv_cache.h"
#include "qfilters/sequence_cache.h"

#include "unit/heap.h"
#include "unit/kv_cache_fixture.h"
#include "unit/test_util.h"

namespace qfilters {
namespace {

using test::config_of;
using test::error_of;
using test::HalfTensor;
using test::IsError;
using test::LayerData;

constexpr std::size_t kHuge[] = {
    kMostSize + 1,
    std::size_t{1} << 32,
    std::size_t{1} << 63,
    (std::size_t{1} << 63) + 1,
    std::numeric_limits<std::size_t>::max()};

// Strides 0: a few numbers stand for a tensor of any size.
TensorView view_of(std::array<std::size_t, 4> shape, DType dtype) {
  static const std::vector<float> zeros(kMostSize);
  return {zeros.data(), dtype, shape[0], shape[1], shape[2], shape[3], 0, 0, 0};
}

// Whether `action` succeeds although its `nth` allocation fails, if there are
// as many.
template <typename Action>
bool succeeds(int nth, Action&& action) {
  test::heap().until_failure = nth;
  try {
    action();
    test::heap().until_failure = 0;
    return true;
  } catch (const std::bad_alloc&) {
    test::heap().until_failure = 0;
    return false;
  }
}

TEST(LimitsTest, NoStoreOrSequenceHasAHugeShape) {
  RowPool pool;
  std::vector<RowShape> shapes = {{1024, 1025, 1, 1}};
  for (const std::size_t huge : kHuge) {
    shapes.insert(
        shapes.end(),
        {{huge, 2, 8, 8}, {2, huge, 8, 8}, {1, 2, huge, 8}, {1, 2, 8, huge}});
  }
  for (const RowShape& s : shapes) {
    const auto refused = IsError(
        ErrorKind::kInvalidArgument,
        "batch=" + std::to_string(s.batch) +
            " kv_heads=" + std::to_string(s.kv_heads) +
            " key_dim=" + std::to_string(s.key_dim) +
            " value_dim=" + std::to_string(s.value_dim));
    EXPECT_THAT(error_of([&] { const KVStore store(pool, s); }), refused);
    SequenceOptions options;
    options.batch = s.batch;
    EXPECT_THAT(
        error_of([&] {
          const SequenceCache cache(
              {{s.kv_heads, s.key_dim, s.value_dim}}, Policy::full(), options);
        }),
        refused);
  }
  EXPECT_TRUE((RowShape{kMostSize, 1, kMostSize, kMostSize}.valid()));
}

TEST(LimitsTest, ThreadsAreLimited) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 2);
  const auto queries = test::random_floats(1, 2, 3, 2, 20);
  std::vector<float> out(240);
  const auto with = [&](int threads) {
    SequenceOptions options;
    options.threads = threads;
    const auto made = error_of([&] {
      const SequenceCache sequence({{2, 8, 8}}, Policy::full(), options);
    });
    const auto attended = error_of([&] {
      attend(
          queries.view(),
          rows,
          {.threads = threads},
          OutputView::dense(out.data(), 2, 3, 2, 20));
    });
    EXPECT_EQ(made.has_value(), attended.has_value());
    for (const auto& error : {made, attended}) {
      if (!error) continue;
      EXPECT_THAT(
          error,
          IsError(
              ErrorKind::kInvalidArgument,
              "threads=" + std::to_string(threads)));
    }
    return !made.has_value();
  };
  for (const int bad : {-1, 0, kMostThreads + 1, 1 << 20, 2147483647}) {
    EXPECT_FALSE(with(bad));
  }
  EXPECT_TRUE(with(1));
  EXPECT_TRUE(with(3));
}

TEST(LimitsTest, AttentionHasNoHugeNumberOfQueryHeads) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 2);
  std::vector<float> out(20, -7.0F);
  for (const std::size_t heads :
       {3 * kMostSize, std::size_t{3} << 40, std::size_t{3} << 61}) {
    const OutputView to{out.data(), 2, heads, 2, 20, 0, 0, 0};
    EXPECT_THAT(
        error_of([&] {
          attend(view_of({2, heads, 2, 20}, DType::kFloat32), rows, {}, to);
        }),
        IsError(ErrorKind::kShape, std::to_string(heads)));
  }
  EXPECT_EQ(out, std::vector<float>(20, -7.0F));
}

TEST(LimitsTest, AnUpdateOfAHugeShapeChangesNothing) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4));
  std::vector<std::array<std::size_t, 4>> shapes = {
      {std::size_t{1} << 32, std::size_t{1} << 32, 1, 8},
      {1, std::size_t{1} << 24, std::size_t{1} << 30, std::size_t{1} << 10},
      {1, 1, kMostTokens + 1, 8},
      {1, 1, std::numeric_limits<std::size_t>::max(), 8}};
  for (const std::size_t huge : kHuge) {
    shapes.insert(
        shapes.end(), {{huge, 2, 1, 8}, {2, huge, 1, 8}, {1, 2, 1, huge}});
  }
  for (const auto& shape : shapes) {
    const TensorView rows = view_of(shape, DType::kFloat16);
    const auto error = error_of([&] { cache.update_and_fetch(rows, rows); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ErrorKind::kInvalidArgument) << error->what();
    EXPECT_TRUE(cache.empty());
  }
  EXPECT_EQ(data.feed(cache, 5).shape().batch, 2U);
}

TEST(LimitsTest, AnUpdateThatNoMemoryHoldsChangesNothing) {
  const LayerData data;
  const std::size_t many = std::size_t{1} << 24;
  for (const std::size_t heads : {std::size_t{1}, kMostSize}) {
    QFiltersKVCache cache(config_of(16, 4));
    // With all heads the product is 2^64.
    const auto rows = view_of({1, heads, many, kMostSize}, DType::kFloat32);
    EXPECT_THROW(cache.update_and_fetch(rows, rows), std::bad_alloc);
    EXPECT_TRUE(cache.empty());
    EXPECT_EQ(cache.offset(), 0U);
    EXPECT_EQ(data.feed(cache, 5).shape().batch, 2U);
  }
}

TEST(LimitsTest, PositionsThatExceedInt32LeaveTheLastRowsReadable) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 30);
  const TensorView more =
      view_of({2, 3, kMostTokens - 29, 20}, DType::kFloat16);
  EXPECT_THAT(
      error_of([&] { cache.update_and_fetch(more, more); }),
      IsError(ErrorKind::kInvalidArgument, "offset=30"));
  EXPECT_TRUE(data.is_token(rows, 5, 29, 29));
}

// Each allocation of an update fails once; the cache goes on as its twin.
TEST(LimitsTest, AFailedUpdateIsAsIfItHadNotHappened) {
  const LayerData data;
  Config config = config_of(16, 4);
  config.qfilters_calib_tokens = 25;
  for (const std::size_t before : {0, 10, 20, 40}) {
    QFiltersKVCache twin(config);
    if (before > 0) data.feed(twin, before);
    data.feed(twin, 12);
    int failures = 0;
    for (bool done = false; !done; ++failures) {
      QFiltersKVCache cache(config);
      if (before > 0) data.feed(cache, before);
      done = succeeds(failures + 1, [&] { data.feed(cache, 12); });
      if (!done) {
        EXPECT_EQ(cache.offset(), before);
        EXPECT_EQ(cache.empty(), before == 0);
        if (before == 10 || before == 20) {
          EXPECT_TRUE(cache.filter().empty()) << failures;
        }
        data.feed(cache, 12);
      }
      for (std::size_t g = 0; g < data.groups(); ++g) {
        ASSERT_EQ(cache.positions(g), twin.positions(g)) << failures;
        ASSERT_EQ(cache.scores(g), twin.scores(g)) << failures;
        ASSERT_TRUE(std::ranges::equal(cache.filter(g), twin.filter(g)));
      }
    }
    EXPECT_GT(failures, 3);
  }
}

TEST(LimitsTest, AttentionAndCommitPassOnThatMemoryIsMissing) {
  const HalfTensor rows(DType::kFloat16, 1, 2, 90, 8);
  const auto queries = test::random_floats(1, 1, 4, 90, 8);
  const auto run = [&](int nth, int threads) {
    std::vector<float> out(2880);
    SequenceOptions options;
    options.threads = threads;
    PolicyOptions policy;
    policy.budget = 40;
    SequenceCache cache({{2, 8, 8}}, Policy::make("knorm", policy), options);
    cache.begin(90);
    cache.append(0, rows.view(), rows.view());
    const bool done = succeeds(nth, [&] {
      attend(
          queries.view(),
          cache.rows(0),
          {.threads = threads},
          OutputView::dense(out.data(), 1, 4, 90, 8));
      cache.commit();
    });
    EXPECT_EQ(cache.open(), !done);
    if (!done) cache.commit();
    EXPECT_EQ(cache.store(0).rows(0), 40U);
    return done;
  };
  for (const int threads : {1, 3}) {
    int nth = 0;
    for (bool done = false; !done;) {
      ++nth;  // a new thread: an old one has its working memory already
      std::thread([&] { done = run(nth, threads); }).join();
    }
    EXPECT_GT(nth, 10);
  }
}

TEST(LimitsTest, AMaskThatCannotBeSettlesNothing) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 30);
  const auto mask = [&](std::size_t tokens) {
    return
        [&cache, tokens] { static_cast<void>(cache.make_mask(tokens, true)); };
  };
  for (const std::size_t tokens :
       {kMostTokens - 29,
        std::size_t{1} << 63,
        std::numeric_limits<std::size_t>::max()}) {
    EXPECT_THAT(
        error_of(mask(tokens)),
        IsError(
            ErrorKind::kInvalidArgument,
            "make_mask: tokens=" + std::to_string(tokens) + " offset=30"));
  }
  for (const std::size_t tokens : {std::size_t{1} << 20, kMostTokens - 30}) {
    EXPECT_THROW(mask(tokens)(), std::bad_alloc);
  }
  EXPECT_TRUE(data.is_token(rows, 5, 29, 29));
}

TEST(LimitsTest, CallsThatAreRefusedSettleNothing) {
  const LayerData data;
  QFiltersKVCache cache(config_of(16, 4), data.filters);
  const RowsView rows = data.feed(cache, 30);
  EXPECT_TRUE(error_of([&] { static_cast<void>(cache.positions(6)); }));
  EXPECT_TRUE(error_of([&] { static_cast<void>(cache.scores(6)); }));
  EXPECT_TRUE(error_of([&] { static_cast<void>(cache.filter(6)); }));
  EXPECT_TRUE(error_of([&] { cache.restore(Snapshot()); }));
  for (std::size_t g = 0; g < data.groups(); ++g) {
    ASSERT_EQ(rows.rows(g), 30U);
    EXPECT_TRUE(data.is_token(rows, g, 29, 29));
  }
  QFiltersKVCache other(config_of(16, 4), data.filters);
  data.feed(other, 9);
  cache.restore(other.save());
  EXPECT_EQ(cache.positions(1), other.positions(1));
}

TEST(LimitsTest, CalibrationHasNoHugeShapes) {
  for (const std::size_t huge : kHuge) {
    for (const QueryShape& shape :
         {QueryShape{huge, 1, 8},
          QueryShape{huge, huge, 8},
          QueryShape{2, 1, huge}}) {
      EXPECT_THAT(
          error_of([&] { const Calibrator calibrator({shape}); }),
          IsError(ErrorKind::kInvalidArgument, std::to_string(huge)));
    }
    Calibrator calibrator({{2, 1, 8}});
    EXPECT_THAT(
        error_of([&] {
          calibrator.add(0, view_of({huge, 2, 1, 8}, DType::kFloat32));
        }),
        IsError(ErrorKind::kShape, std::to_string(huge)));
    EXPECT_THAT(
        error_of([&] {
          calibrator.add(
              0,
              view_of(
                  {1, 2, std::max(huge, kMostTokens + 1), 8}, DType::kFloat32));
        }),
        IsError(ErrorKind::kShape, ""));
    EXPECT_EQ(calibrator.rows(0), 0U);
    for (const auto& shape :
         {std::array<std::size_t, 4>{1, huge, 2, 8}, {1, 2, 2, huge}}) {
      EXPECT_THAT(
          error_of([&] {
            static_cast<void>(
                compute_qfilters(view_of(shape, DType::kFloat32)));
          }),
          IsError(ErrorKind::kShape, std::to_string(huge)));
    }
  }
  EXPECT_THROW(
      static_cast<void>(compute_qfilters(
          view_of({1, kMostSize, 4096, kMostSize}, DType::kFloat32), 4096)),
      std::bad_alloc);
  EXPECT_THROW(
      static_cast<void>(average_gqa_filters(
          {0, std::size_t{1} << 40, {}}, std::size_t{1} << 40)),
      std::bad_alloc);
}

TEST(LimitsTest, NoModelHasHugeLayers) {
  for (const std::size_t huge : kHuge) {
    for (const ModelShape::Attention layer :
         {ModelShape::Attention{huge, 8}, ModelShape::Attention{8, huge}}) {
      EXPECT_THAT(
          error_of([&] {
            static_cast<void>(CacheBuilder::for_model({{layer}, ""}));
          }),
          IsError(ErrorKind::kInvalidArgument, std::to_string(huge)));
    }
    EXPECT_THAT(
        error_of([&] {
          const FilterBank bank({{huge, huge, {}}}, {});
        }),
        IsError(ErrorKind::kShape, std::to_string(huge)));
  }
}

}  // namespace
}  // namespace qfilters
