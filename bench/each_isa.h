#pragma once

#include <string>

#include <benchmark/benchmark.h>

#include "qfilters/isa.h"

namespace qfilters::bench {

/// Registers a benchmark once for each instruction set that runs here, as
/// NAME/isa:avx2 and so on; `arguments` gets each of them. The value is of no
/// use: it lets a constant at namespace scope do it, as BENCHMARK does.
inline bool on_each_isa(
    const std::string& name,
    void (*run)(benchmark::State&),
    void (*arguments)(benchmark::internal::Benchmark*)) {
  for (const std::string& isa : runnable_isas()) {
    arguments(benchmark::RegisterBenchmark(
        (name + "/isa:" + isa).c_str(), [=](benchmark::State& state) {
          const std::string before = active_isa();
          set_isa(isa);
          run(state);
          set_isa(before);
        }));
  }
  return true;
}

}  // namespace qfilters::bench
