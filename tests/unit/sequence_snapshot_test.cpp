// save() and restore() of a SequenceCache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"
#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"

namespace qfilters {
namespace {

using test::budget;
using test::contents_of;
using test::Model;
using test::qfilters_policy;
using test::two_layers;

constexpr const char* kPart = "sequence";

Snapshot with_part(std::vector<char> bytes) {
  Snapshot out;
  out.put_values<char>(kPart, bytes);
  return out;
}

ErrorKind refusal(SequenceCache& cache, const Snapshot& saved) {
  try {
    cache.restore(saved);
  } catch (const Error& error) {
    return error.kind();
  }
  ADD_FAILURE() << "restored";
  return ErrorKind::kRuntime;
}

// Global and windowed layers of different shapes.
const Model& mixed_layers() {
  static const Model model({{2, 24, 24, 0}, {1, 16, 8, 70}}, 2);
  return model;
}

void continue_as_if_never_interrupted(RowFormat format) {
  Model model({{2, 24, 24, 0}, {1, 16, 8, 70}}, 2);
  model.format = format;
  const Policy policy = qfilters_policy(model, budget(40, 2, 8, 5));
  SequenceCache straight(model.layers, policy, model.options());
  model.feed(straight, {100, 33});
  SequenceCache resumed(model.layers, policy, model.options());
  model.feed(resumed, {20});  // overwritten
  resumed.restore(straight.save());
  EXPECT_EQ(contents_of(resumed), contents_of(straight));
  for (const std::size_t count : {7U, 1U, 1U, 64U, 50U}) {
    model.feed(straight, {count});
    model.feed(resumed, {count});
    ASSERT_EQ(contents_of(resumed), contents_of(straight));
  }
  const SequenceStats a = straight.stats();
  const SequenceStats b = resumed.stats();
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.evictions, b.evictions);
  EXPECT_EQ(a.rows_evicted, b.rows_evicted);
  EXPECT_EQ(a.kv_bytes, b.kv_bytes);
  EXPECT_EQ(a.kv_bytes_full, b.kv_bytes_full);
}

TEST(SequenceSnapshotTest, ContinuesAsIfNeverInterrupted) {
  continue_as_if_never_interrupted(RowFormat::kSame);
}

TEST(SequenceSnapshotTest, ContinuesInt8RowsAsIfNeverInterrupted) {
  continue_as_if_never_interrupted(RowFormat::kInt8);
}

TEST(SequenceSnapshotTest, RefusesRowsOfTheOtherFormat) {
  const Model& model = two_layers();
  SequenceOptions int8 = model.options();
  int8.format = RowFormat::kInt8;
  SequenceCache a(model.layers, Policy::full(), model.options());
  SequenceCache b(model.layers, Policy::full(), int8);
  model.feed(a, {60});
  model.feed(b, {60});
  const auto before = contents_of(b);
  EXPECT_THAT(
      test::error_of([&] { b.restore(a.save()); }),
      test::IsError(
          ErrorKind::kMismatch,
          "'dtype float16', this cache has 'dtype float16, stored as int8'"));
  EXPECT_THAT(
      test::error_of([&] { a.restore(b.save()); }),
      test::IsError(ErrorKind::kMismatch, "stored as int8"));
  EXPECT_EQ(contents_of(b), before);
}

// What earlier versions wrote: a row is its key, then its value, 16 bits each,
// and no word names a format.
TEST(SequenceSnapshotTest, RowsAsTheyCameAreSavedAsEver) {
  const Model model({{1, 3, 2, 0}});
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {1});
  const auto part = cache.save().values<std::uint8_t>(kPart);
  std::vector<std::uint8_t> want;
  const auto put = [&](std::uint16_t x) {
    want.push_back(static_cast<std::uint8_t>(x & 0xFFU));
    want.push_back(static_cast<std::uint8_t>(x >> 8U));
  };
  for (const std::uint16_t x : model.keys[0].row(0, 0, 0))
    put(x);
  for (const std::uint16_t x : model.values[0].row(0, 0, 0))
    put(x);
  ASSERT_GT(part.size(), want.size());
  EXPECT_TRUE(std::equal(want.rbegin(), want.rend(), part.rbegin()));
  // The word, with its length in front and "batch 1" behind.
  const std::string word = "dtype float16\x07";
  const auto at =
      std::search(part.begin(), part.end(), word.begin(), word.end());
  ASSERT_NE(at, part.end());
  EXPECT_EQ(*(at - 8), 13);
}

TEST(SequenceSnapshotTest, SavesAnEmptySequence) {
  const Model& model = mixed_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  SequenceCache other(model.layers, Policy::full(), model.options());
  model.feed(other, {9});
  other.restore(cache.save());
  EXPECT_EQ(other.offset(), 0U);
  EXPECT_EQ(contents_of(other), contents_of(cache));
}

TEST(SequenceSnapshotTest, RefusesAnotherModelPolicyOrType) {
  const Model& model = two_layers();
  const Policy policy = qfilters_policy(model, budget(40, 2, 8));
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {60});
  const auto saved = cache.save();
  const auto refused_by = [&](std::vector<LayerShape> layers,
                              const Policy& other,
                              const SequenceOptions& options) {
    SequenceCache target(std::move(layers), other, options);
    EXPECT_EQ(refusal(target, saved), ErrorKind::kMismatch);
    EXPECT_EQ(target.offset(), 0U);
    EXPECT_EQ(target.stats().kv_bytes, 0U);
  };
  refused_by(model.layers, Policy::full(), model.options());
  refused_by(
      model.layers, qfilters_policy(model, budget(41, 2, 8)), model.options());
  refused_by(
      model.layers,
      qfilters_policy(model, budget(40, 2, 8, 3)),
      model.options());
  // Filters of the same shape, but not the same.
  const auto filters = [&] {
    std::vector<LayerFilters> layers;
    for (std::size_t l = 0; l < model.filters->layers(); ++l) {
      layers.push_back(model.filters->layer(l));
    }
    layers.back().values.back() += 1.0F;
    return std::make_shared<const FilterBank>(layers, FilterMetadata{});
  }();
  refused_by(
      model.layers,
      Policy::make("qfilters", budget(40, 2, 8), filters),
      model.options());
  SequenceOptions single = model.options();
  single.batch = 1;
  refused_by(model.layers, policy, single);
  SequenceOptions bfloat = model.options();
  bfloat.dtype = DType::kBFloat16;
  refused_by(model.layers, policy, bfloat);
}

TEST(SequenceSnapshotTest, RefusesDamagedDataAndStaysAsItWas) {
  const Model& model = mixed_layers();
  const Policy policy = qfilters_policy(model, budget(30, 2, 8));
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {100});
  const auto saved = cache.save().values<char>(kPart);
  SequenceCache target(model.layers, policy, model.options());
  model.feed(target, {50});
  const auto before = contents_of(target);
  for (std::size_t size = 0; size < saved.size(); size += 97) {
    const ErrorKind kind = refusal(
        target,
        with_part({saved.begin(), saved.begin() + std::ptrdiff_t(size)}));
    ASSERT_TRUE(kind == ErrorKind::kFile || kind == ErrorKind::kMismatch);
    ASSERT_EQ(contents_of(target), before) << size;
  }
  auto longer = saved;
  longer.push_back(0);
  EXPECT_EQ(refusal(target, with_part(longer)), ErrorKind::kFile);
  EXPECT_EQ(refusal(target, Snapshot()), ErrorKind::kFile);
  EXPECT_EQ(contents_of(target), before);
}

TEST(SequenceSnapshotTest, NeverTripsOverAFlippedByte) {
  const Model& model = mixed_layers();
  const Policy policy = qfilters_policy(model, budget(20, 2, 4));
  SequenceCache cache(model.layers, policy, model.options());
  model.feed(cache, {30});
  const auto saved = cache.save().values<char>(kPart);
  for (std::size_t i = 0; i < saved.size(); i += 3) {
    auto damaged = saved;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x11);
    SequenceCache target(model.layers, policy, model.options());
    try {
      target.restore(with_part(damaged));
      // Rows and scores carry no redundancy of their own; what was accepted
      // must be usable all the same.
      model.append(target, 0);
      target.commit();
    } catch (const Error& error) {
      EXPECT_TRUE(
          error.kind() == ErrorKind::kFile ||
          error.kind() == ErrorKind::kMismatch)
          << i << ": " << error.what();
    }
  }
}

TEST(SequenceSnapshotTest, LeavesAMicroBatchAlone) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  const auto empty = cache.save();
  model.append(cache, 5);
  EXPECT_THROW(static_cast<void>(cache.save()), Error);
  EXPECT_EQ(refusal(cache, empty), ErrorKind::kInvalidArgument);
  cache.commit();
  EXPECT_EQ(cache.offset(), 5U);
}

TEST(SequenceSnapshotTest, KeepsToTheMemoryLimit) {
  const Model& model = two_layers();
  SequenceCache cache(model.layers, Policy::full(), model.options());
  model.feed(cache, {200});
  SequenceOptions limited = model.options();
  limited.byte_limit = cache.stats().kv_bytes - 1;
  SequenceCache target(model.layers, Policy::full(), limited);
  EXPECT_EQ(refusal(target, cache.save()), ErrorKind::kMemoryLimit);
  EXPECT_EQ(target.stats().kv_bytes, 0U);
}

}  // namespace
}  // namespace qfilters
