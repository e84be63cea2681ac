// ggml's own attention over the same rows as bench_attention.cpp: the fused
// operation, and the three that it stands for (llama.cpp with flash attention
// on and off). float16 rows, one thread.
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include <benchmark/benchmark.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "attention_shapes.h"

namespace qfilters::bench {
namespace {

struct FreeContext {
  void operator()(ggml_context* context) const noexcept { ggml_free(context); }
};

// A graph of one attention of `tokens` new queries over `rows` rows.
class Attention {
 public:
  Attention(const benchmark::State& state, bool fused)
      : rows_(state.range(0)),
        tokens_(state.range(1)),
        kv_heads_(state.range(2)),
        heads_(kv_heads_ * state.range(3)),
        dim_(state.range(4)),
        context_(ggml_init({std::size_t{1} << 30, nullptr, false})) {
    ggml_tensor* const out = fused ? flash() : plain();
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, out);
    plan_ = ggml_graph_plan(graph_, 1, nullptr);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void compute() { ggml_graph_compute(graph_, &plan_); }

 private:
  ggml_tensor* halves(std::int64_t a, std::int64_t b, std::int64_t c) {
    ggml_tensor* const out =
        ggml_new_tensor_3d(context_.get(), GGML_TYPE_F16, a, b, c);
    ggml_set_f32(out, 0.25F);
    return out;
  }

  ggml_tensor* queries() {
    ggml_tensor* const out = ggml_new_tensor_3d(
        context_.get(), GGML_TYPE_F32, dim_, tokens_, heads_);
    ggml_set_f32(out, 0.1F);
    return out;
  }

  // Query i sees all rows but the tokens - 1 - i newest.
  ggml_tensor* mask() {
    if (tokens_ == 1) return nullptr;
    ggml_tensor* const out =
        ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, rows_, tokens_);
    auto* to = static_cast<ggml_fp16_t*>(out->data);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      for (std::int64_t r = 0; r < rows_; ++r, ++to) {
        *to = ggml_fp32_to_fp16(r <= rows_ - tokens_ + t ? 0.0F : -INFINITY);
      }
    }
    return out;
  }

  [[nodiscard]] float scale() const {
    return 1.0F / std::sqrt(static_cast<float>(dim_));
  }

  ggml_tensor* flash() {
    return ggml_flash_attn_ext(
        context_.get(),
        queries(),
        halves(dim_, rows_, kv_heads_),
        halves(dim_, rows_, kv_heads_),
        mask(),
        scale(),
        0.0F,
        0.0F);
  }

  // Values are stored transposed, as llama.cpp does without flash attention.
  ggml_tensor* plain() {
    ggml_context* const c = context_.get();
    ggml_tensor* const scores =
        ggml_mul_mat(c, halves(dim_, rows_, kv_heads_), queries());
    ggml_tensor* const weights =
        ggml_soft_max_ext(c, scores, mask(), scale(), 0.0F);
    return ggml_mul_mat(c, halves(rows_, dim_, kv_heads_), weights);
  }

  std::int64_t rows_;
  std::int64_t tokens_;
  std::int64_t kv_heads_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::unique_ptr<ggml_context, FreeContext> context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<std::uint8_t> work_;
};

void run(benchmark::State& state, bool fused) {
  Attention attention(state, fused);
  for (auto _ : state)
    attention.compute();
  count_attention(state);
}

void BM_GgmlFlash(benchmark::State& state) {
  run(state, true);
}

void BM_GgmlPlain(benchmark::State& state) {
  run(state, false);
}

BENCHMARK(BM_GgmlFlash)->Apply(model_shapes);
BENCHMARK(BM_GgmlPlain)->Apply(model_shapes);

}  // namespace
}  // namespace qfilters::bench
