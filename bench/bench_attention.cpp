#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/attention.h"
#include "qfilters/sequence_cache.h"

#include "attention_shapes.h"
#include "each_isa.h"

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

// New queries over stored rows: tokens = 1 is decoding. The arguments of
// attention_shapes.h.
class Attention {
 public:
  explicit Attention(
      const benchmark::State& state, RowFormat format = RowFormat::kSame)
      : rows_(static_cast<std::size_t>(state.range(0))),
        tokens_(static_cast<std::size_t>(state.range(1))),
        kv_heads_(static_cast<std::size_t>(state.range(2))),
        heads_(kv_heads_ * static_cast<std::size_t>(state.range(3))),
        dim_(static_cast<std::size_t>(state.range(4))),
        fill_(halves(rows_ * kv_heads_ * dim_)),
        query_(heads_ * tokens_ * dim_, 0.1F),
        out_(query_.size()),
        cache_({{kv_heads_, dim_, dim_}}, Policy::full(), options(format)) {
    append(rows_ - tokens_);
    cache_.commit();
    append(tokens_);
  }

  void compute(const AttentionOptions& options) {
    attend(
        TensorView::dense(
            query_.data(), DType::kFloat32, 1, heads_, tokens_, dim_),
        cache_.rows(0),
        options,
        OutputView::dense(out_.data(), 1, heads_, tokens_, dim_));
    benchmark::ClobberMemory();
  }

 private:
  static SequenceOptions options(RowFormat format) {
    SequenceOptions out;
    out.format = format;
    return out;
  }

  void append(std::size_t count) {
    const auto view = TensorView::dense(
        fill_.data(), DType::kFloat16, 1, kv_heads_, count, dim_);
    cache_.begin(count);
    cache_.append(0, view, view);
  }

  std::size_t rows_;
  std::size_t tokens_;
  std::size_t kv_heads_;
  std::size_t heads_;
  std::size_t dim_;
  std::vector<std::uint16_t> fill_;
  std::vector<float> query_;
  std::vector<float> out_;
  SequenceCache cache_;
};

void BM_Attend(benchmark::State& state) {
  Attention attention(state);
  for (auto _ : state)
    attention.compute({});
  count_attention(state);
}

// The same rows as int8: bytes and operations count as those of BM_Attend.
void BM_AttendInt8(benchmark::State& state) {
  Attention attention(state, RowFormat::kInt8);
  for (auto _ : state)
    attention.compute({});
  count_attention(state);
}

BENCHMARK(BM_Attend)
    ->Apply(model_shapes)
    ->Args({1024, 1, 3, 3, 64})
    ->Args({4096, 1, 8, 4, 128})
    ->Args({4096, 256, 8, 4, 128})
    ->Args({2048, 2048, 8, 4, 128});

BENCHMARK(BM_AttendInt8)
    ->Apply(model_shapes)
    ->Args({1024, 1, 3, 3, 64})
    ->Args({4096, 1, 8, 4, 128})
    ->Args({4096, 256, 8, 4, 128});

// Whether `count` threads at once each get a core of their own: their
// processor time is as long as the time on the wall.
bool run_undisturbed(int count) {
  std::atomic<bool> idle = true;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&idle] {
      using Clock = std::chrono::steady_clock;
      constexpr double kSeconds = 0.03;
      const auto processor = [] {
        timespec now{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return static_cast<double>(now.tv_sec) +
               1e-9 * static_cast<double>(now.tv_nsec);
      };
      const auto start = Clock::now();
      const double before = processor();
      double wall = 0;
      while (wall < kSeconds) {
        wall = std::chrono::duration<double>(Clock::now() - start).count();
      }
      if (processor() - before < 0.95 * wall) idle = false;
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  return idle;
}

// Now and then something else runs for a moment on any machine: one of some
// tries is enough.
bool cores_are_idle(int count) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    // OpenMP's own threads look for work for a while after each loop.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (run_undisturbed(count)) return true;
  }
  return false;
}

// The same on one thread and on two, in turn: `speedup` is the ratio of the
// shortest times of each, the benchmark's time that of two threads.
void BM_AttendTwoThreads(benchmark::State& state) {
  constexpr const char* kBusy = "no two idle cores: the ratio means nothing";
  if (!cores_are_idle(2)) return state.SkipWithError(kBusy);
  Attention attention(state);
  double best[2] = {1e9, 1e9};
  for (auto _ : state) {
    double seconds = 0;
    for (const int threads : {1, 2}) {
      const auto start = std::chrono::steady_clock::now();
      attention.compute({.threads = threads});
      const std::chrono::duration<double> took =
          std::chrono::steady_clock::now() - start;
      seconds = took.count();
      best[threads - 1] = std::min(best[threads - 1], seconds);
    }
    state.SetIterationTime(seconds);
  }
  if (!cores_are_idle(2)) return state.SkipWithError(kBusy);
  state.counters["speedup"] = best[0] / best[1];
}

BENCHMARK(BM_AttendTwoThreads)
    ->ArgNames({"rows", "tokens", "kv_heads", "share", "dim"})
    ->Args({4096, 1, 3, 3, 64})
    ->Args({4096, 1, 8, 4, 128})
    ->Args({4096, 1, 1, 4, 256})
    ->Args({512, 1, 3, 3, 64})
    ->UseManualTime();

const bool kAttend = on_each_isa("BM_Attend", BM_Attend, [](auto* bench) {
  bench->ArgNames({"rows", "tokens", "kv_heads", "share", "dim"})
      ->Args({4096, 1, 8, 4, 128})
      ->Args({4096, 256, 8, 4, 128})
      ->UseRealTime();
});

}  // namespace
}  // namespace qfilters::bench
