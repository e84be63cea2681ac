#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/scoring.h"

#include "count_work.h"
#include "each_isa.h"

namespace qfilters::bench {
namespace {

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
  count_work(state, tokens, tokens * dim * 2, tokens * dim * 2);
}

BENCHMARK(BM_ScoreProjection)
    ->ArgNames({"tokens", "dim"})
    ->Args({8192, 64})
    ->Args({8192, 128})
    ->Args({524288, 128})
    ->UseRealTime();

const bool kScoreProjection =
    on_each_isa("BM_ScoreProjection", BM_ScoreProjection, [](auto* bench) {
      bench->ArgNames({"tokens", "dim"})->Args({8192, 128})->UseRealTime();
    });

}  // namespace
}  // namespace qfilters::bench
