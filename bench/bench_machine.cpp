// What the machine allows, measured in the same run as the kernels: reading
// memory, copying it, and multiply-adds on registers.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench_machine.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();

namespace qfilters::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Four streams of independent additions: bound by loads, not by latency.
std::uint32_t read(const std::uint32_t* data, std::size_t count) {
  const hn::ScalableTag<std::uint32_t> d;
  const std::size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d);
  auto b = a;
  auto c = a;
  auto e = a;
  for (std::size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Add(a, hn::LoadU(d, data + i));
    b = hn::Add(b, hn::LoadU(d, data + i + lanes));
    c = hn::Add(c, hn::LoadU(d, data + i + 2 * lanes));
    e = hn::Add(e, hn::LoadU(d, data + i + 3 * lanes));
  }
  const auto sum = hn::Add(hn::Add(a, b), hn::Add(c, e));
  HWY_ALIGN std::uint32_t out[HWY_MAX_BYTES / sizeof(std::uint32_t)];
  hn::Store(sum, d, out);
  return out[0];
}

// Twelve chains hide the latency of two multiply-add units. Returns the
// operations done.
std::size_t multiply_add(std::size_t rounds, float* out) {
  const hn::ScalableTag<float> d;
  constexpr std::size_t kChains = 12;
  hn::Vec<decltype(d)> sums[kChains];
  for (auto& sum : sums)
    sum = hn::Set(d, *out);
  const auto x = hn::Set(d, 0.999F);
  const auto y = hn::Set(d, 0.001F);
  for (std::size_t i = 0; i < rounds; ++i) {
    for (auto& sum : sums)
      sum = hn::MulAdd(sum, x, y);
  }
  for (const auto& sum : sums)
    *out += hn::GetLane(sum);
  return rounds * kChains * hn::Lanes(d) * 2;
}

}  // namespace qfilters::bench::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::bench {

HWY_EXPORT(read);
HWY_EXPORT(multiply_add);

namespace {

// The rows of 4,096 tokens of a small and a large layer, and more than any
// cache holds.
void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgName("bytes")
      ->Arg(4096 * 3 * 64 * 4)
      ->Arg(4096 * 8 * 128 * 4)
      ->Arg(8192 * 8 * 128 * 4)
      ->Arg(256 << 20)
      ->UseRealTime();
}

void BM_MachineRead(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::vector<std::uint32_t> data(bytes / sizeof(std::uint32_t), 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        HWY_DYNAMIC_DISPATCH(read)(data.data(), data.size()));
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

BENCHMARK(BM_MachineRead)->Apply(sizes);

void BM_MachineCopy(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

BENCHMARK(BM_MachineCopy)->Apply(sizes);

void BM_MachineMultiplyAdd(benchmark::State& state) {
  float out = 0.5F;
  std::size_t operations = 0;
  for (auto _ : state) {
    operations += HWY_DYNAMIC_DISPATCH(multiply_add)(100000, &out);
    benchmark::DoNotOptimize(out);
  }
  state.counters["flops"] = benchmark::Counter(
      static_cast<double>(operations), benchmark::Counter::kIsRate);
}

BENCHMARK(BM_MachineMultiplyAdd)->UseRealTime();

}  // namespace
}  // namespace qfilters::bench

#endif  // HWY_ONCE
