#include <cstdint>
#include <memory>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/sequence_cache.h"

#include "count_work.h"
#include "each_isa.h"

namespace qfilters::bench {
namespace {

constexpr std::size_t kHeads = 8;
constexpr std::size_t kDim = 128;

// float16 rows of [heads, tokens, dim] that score in no order.
struct Rows {
  explicit Rows(std::size_t tokens)
      : count(tokens), data(kHeads * tokens * kDim) {
    std::uint32_t state = 1;
    for (auto& value : data) {
      state = state * 1664525U + 1013904223U;
      value = static_cast<std::uint16_t>(
          0x3800U | ((state >> 16) & 0x3FFU) | ((state >> 10) & 0x8000U));
    }
  }

  // `tokens` rows of each head from row `first` on.
  [[nodiscard]] TensorView view(std::size_t first, std::size_t tokens) const {
    TensorView all =
        TensorView::dense(data.data(), DType::kFloat16, 1, kHeads, count, kDim);
    all.data = all.row(0, 0, first);
    all.tokens = tokens;
    return all;
  }

  std::size_t count;
  std::vector<std::uint16_t> data;
};

Policy bounded(std::size_t budget, std::size_t interval) {
  const LayerFilters layer{kHeads, kDim, std::vector<float>(kHeads * kDim, 1)};
  PolicyOptions options;
  options.budget = budget;
  options.interval = interval;
  options.protection = {4, budget / 2};
  return Policy::make(
      "qfilters",
      options,
      std::make_shared<const FilterBank>(
          std::vector<LayerFilters>{layer}, FilterMetadata{}));
}

void step(SequenceCache& cache, const TensorView& rows) {
  cache.begin(rows.tokens);
  cache.append(0, rows, rows);
  cache.commit();
}

// The new rows' keys and values, each key scored once.
void count_update(benchmark::State& state, std::size_t tokens) {
  const std::size_t rows = tokens * kHeads;
  count_work(state, tokens, rows * kDim * 4, rows * kDim * 2);
}

// A decode step of one layer that is at its budget: score, select, compact.
// Evictions come every `interval` steps, so this is their average.
void BM_DecodeUpdate(benchmark::State& state) {
  const auto budget = static_cast<std::size_t>(state.range(0));
  const auto interval = static_cast<std::size_t>(state.range(1));
  const Rows rows(budget + 1024);
  SequenceOptions options;
  options.order = state.range(2) == 0 ? RowOrder::kTemporal : RowOrder::kSlot;
  SequenceCache cache(
      {{kHeads, kDim, kDim}}, bounded(budget, interval), options);
  step(cache, rows.view(0, budget + interval));
  std::size_t next = 0;
  for (auto _ : state) {
    step(cache, rows.view(next, 1));
    next = (next + 1) % rows.count;
  }
  count_update(state, 1);
}

BENCHMARK(BM_DecodeUpdate)
    ->ArgNames({"budget", "interval", "slots"})
    ->ArgsProduct({{512, 2048, 4096}, {0, 64}, {0}})
    ->ArgsProduct({{512, 2048, 4096}, {0}, {1}})
    ->UseRealTime();

const bool kDecodeUpdate =
    on_each_isa("BM_DecodeUpdate", BM_DecodeUpdate, [](auto* bench) {
      bench->ArgNames({"budget", "interval"})->Args({4096, 0})->UseRealTime();
    });

// A prefill of one layer into an empty cache, cut to the budget.
void BM_PrefillUpdate(benchmark::State& state) {
  const auto tokens = static_cast<std::size_t>(state.range(0));
  const auto budget = static_cast<std::size_t>(state.range(1));
  const auto interval = static_cast<std::size_t>(state.range(2));
  const Rows rows(tokens);
  SequenceCache cache({{kHeads, kDim, kDim}}, bounded(budget, interval));
  for (auto _ : state) {
    step(cache, rows.view(0, tokens));
    state.PauseTiming();
    cache.clear();
    state.ResumeTiming();
  }
  count_update(state, tokens);
}

BENCHMARK(BM_PrefillUpdate)
    ->ArgNames({"tokens", "budget", "interval"})
    ->ArgsProduct({{8192}, {512}, {0, 64}})
    ->UseRealTime();

const bool kPrefillUpdate =
    on_each_isa("BM_PrefillUpdate", BM_PrefillUpdate, [](auto* bench) {
      bench->ArgNames({"tokens", "budget", "interval"})
          ->Args({8192, 512, 0})
          ->UseRealTime();
    });

}  // namespace
}  // namespace qfilters::bench
