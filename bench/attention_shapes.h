#pragma once

#include <cstdint>

#include <benchmark/benchmark.h>

namespace qfilters::bench {

/// rows, new tokens, KV heads, query heads of each, dim: decoding and a chunk
/// of a prefill, SmolLM2-135M and Gemma 3 270M.
inline void model_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "tokens", "kv_heads", "share", "dim"})
      ->Args({4096, 1, 3, 3, 64})
      ->Args({4096, 1, 1, 4, 256})
      ->Args({8192, 256, 3, 3, 64})
      ->Args({8192, 256, 1, 4, 256})
      ->UseRealTime();
}

/// Reports tokens, bytes of rows and useful operations (the causal part) per
/// second.
inline void count_attention(benchmark::State& state) {
  const auto rows = static_cast<double>(state.range(0));
  const auto tokens = static_cast<double>(state.range(1));
  const auto heads = static_cast<double>(state.range(2) * state.range(3));
  const double scores = tokens * (rows - (tokens - 1) / 2);
  state.counters["flops"] = benchmark::Counter(
      4.0 * scores * heads * static_cast<double>(state.range(4)) *
          static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.SetItemsProcessed(state.iterations() * state.range(1));
  state.SetBytesProcessed(
      state.iterations() * state.range(0) * state.range(2) * state.range(4) *
      4);
}

}  // namespace qfilters::bench
