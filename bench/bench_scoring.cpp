#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/scoring.h"

namespace {

using namespace qfilters;  // NOLINT(google-build-using-namespace)

void BM_ScoreProjection(benchmark::State& state) {
  const auto tokens = static_cast<std::size_t>(state.range(0));
  const auto dim = static_cast<std::size_t>(state.range(1));
  const std::vector<std::uint16_t> keys(tokens * dim, 0x3555);
  const std::vector<float> filter(dim, 0.1F);
  std::vector<float> scores(tokens);
  const auto view =
      TensorView::dense(keys.data(), DType::kFloat16, 1, 1, tokens, dim);
  for (auto _ : state) {
    score_projection(view, 0, 0, filter, 1.0F, scores);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(
      state.iterations() * static_cast<std::int64_t>(tokens * dim * 2));
}

BENCHMARK(BM_ScoreProjection)
    ->ArgNames({"tokens", "dim"})
    ->Args({8192, 64})
    ->Args({8192, 128})
    ->Args({524288, 128})
    ->UseRealTime();

}  // namespace
