#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"

#include "attention_shapes.h"

namespace qfilters::bench {
namespace {

// float16 values in [-1, 1) from a fixed sequence.
std::vector<std::uint16_t> halves(std::size_t count) {
  std::vector<std::uint16_t> out(count);
  std::uint32_t state = 1;
  for (auto& value : out) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<std::uint16_t>(
        0x3800U | ((state >> 16) & 0x3FFU) | ((state >> 10) & 0x8000U));
  }
  return out;
}

// New queries over stored rows: tokens = 1 is decoding.
void BM_Attend(benchmark::State& state) {
  const auto rows = static_cast<std::size_t>(state.range(0));
  const auto tokens = static_cast<std::size_t>(state.range(1));
  const auto heads = static_cast<std::size_t>(state.range(2));
  const auto share = static_cast<std::size_t>(state.range(3));
  const auto dim = static_cast<std::size_t>(state.range(4));
  SequenceCache cache({{heads, dim, dim}}, Policy::full());
  const auto fill = halves(rows * heads * dim);
  const auto view = [&](std::size_t count) {
    return TensorView::dense(
        fill.data(), DType::kFloat16, 1, heads, count, dim);
  };
  cache.begin(rows - tokens);
  cache.append(0, view(rows - tokens), view(rows - tokens));
  cache.commit();
  cache.begin(tokens);
  cache.append(0, view(tokens), view(tokens));
  const std::vector<float> query(heads * share * tokens * dim, 0.1F);
  std::vector<float> out(query.size());
  for (auto _ : state) {
    attend(
        TensorView::dense(
            query.data(), DType::kFloat32, 1, heads * share, tokens, dim),
        cache.rows(0),
        {},
        OutputView::dense(out.data(), 1, heads * share, tokens, dim));
    benchmark::ClobberMemory();
  }
  count_attention(state);
}

BENCHMARK(BM_Attend)
    ->Apply(model_shapes)
    ->Args({1024, 1, 3, 3, 64})
    ->Args({4096, 1, 8, 4, 128})
    ->Args({4096, 256, 8, 4, 128})
    ->Args({2048, 2048, 8, 4, 128});

}  // namespace
}  // namespace qfilters::bench
