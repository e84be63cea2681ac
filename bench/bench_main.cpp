#include <cstdio>
#include <cstdlib>

#include <benchmark/benchmark.h>

#include "qfilters/error.h"
#include "qfilters/isa.h"
#include "qfilters/version.h"

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    const char* const isa = std::getenv("QFILTERS_ISA");
    if (isa != nullptr) qfilters::set_isa(isa);
  } catch (const qfilters::Error& error) {
    std::fprintf(stderr, "qfilters_bench: %s\n", error.what());
    return 2;
  }
  benchmark::AddCustomContext("qfilters", qfilters::kVersion);
  benchmark::AddCustomContext("isa", qfilters::active_isa());
  benchmark::AddCustomContext("compiler", __VERSION__);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
