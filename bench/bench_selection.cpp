#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/selection.h"

namespace {

using namespace qfilters;  // NOLINT(google-build-using-namespace)

void BM_SelectRows(benchmark::State& state) {
  const auto rows = static_cast<std::size_t>(state.range(0));
  const auto keep = static_cast<std::size_t>(state.range(1));
  std::vector<float> scores(rows);
  std::uint32_t seed = 1;
  for (float& score : scores) {
    seed = seed * 1664525U + 1013904223U;
    score = static_cast<float>(seed >> 8);
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(select_rows(scores, keep, {4, keep / 4}));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(
      state.iterations() * static_cast<std::int64_t>(rows * sizeof(float)));
}

BENCHMARK(BM_SelectRows)
    ->ArgNames({"rows", "keep"})
    ->Args({1344, 1024})
    ->Args({8192, 512});

}  // namespace
