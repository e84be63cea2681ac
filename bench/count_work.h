#pragma once

#include <cstddef>
#include <cstdint>

#include <benchmark/benchmark.h>

namespace qfilters::bench {

/// Reports tokens (or rows), bytes and multiply-adds counted as two operations
/// per second, from what one iteration does.
inline void count_work(
    benchmark::State& state,
    std::size_t tokens,
    std::size_t bytes,
    std::size_t flops) {
  const auto all = [&](std::size_t each) {
    return state.iterations() * static_cast<std::int64_t>(each);
  };
  state.SetItemsProcessed(all(tokens));
  state.SetBytesProcessed(all(bytes));
  state.counters["flops"] = benchmark::Counter(
      static_cast<double>(all(flops)), benchmark::Counter::kIsRate);
}

}  // namespace qfilters::bench
