// What the policies cost beside attention: a prefill step of one layer into a
// cache at its budget, scored, observed, chosen and compacted.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <benchmark/benchmark.h>

#include "qfilters/auto_scorer.h"
#include "qfilters/query_statistics.h"
#include "qfilters/sequence_cache.h"

#include "policies/registry.h"

namespace qfilters::bench {
namespace {

// SmolLM2-135M: its attention needs most of its time.
constexpr std::size_t kHeads = 3;
constexpr std::size_t kDim = 64;
constexpr std::size_t kBudget = 512;
constexpr std::size_t kStep = 256;

std::vector<std::uint16_t> random_rows() {
  std::vector<std::uint16_t> rows(kHeads * kStep * kDim);
  std::uint32_t state = 1;
  for (auto& value : rows) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<std::uint16_t>(
        0x3800U | ((state >> 16) & 0x3FFU) | ((state >> 10) & 0x8000U));
  }
  return rows;
}

void step(
    SequenceCache& cache,
    const TensorView& rows,
    AttentionStatistics& statistics) {
  cache.begin(kStep);
  cache.append(0, rows, rows);
  if (const auto needs = cache.attention_needs(0)) {
    statistics.kind = needs->kind;
    statistics.last_queries = needs->last_queries;
    for (std::size_t h = 0; h < kHeads; ++h)
      statistics.rows[h].resize(cache.rows(0).rows(h), 0.25F);
    cache.observe(0, statistics);
  }
  cache.commit();
}

// Three query heads a KV head; all pairs of dimensions turn alike.
FilterBank query_statistics() {
  Rotation rotation;
  for (std::size_t d = 0; d < kDim; ++d) {
    const float angle = d % 2 == 0 ? 0.01F : -0.01F;
    rotation.angle.push_back(angle);
    rotation.partner.push_back(d ^ 1U);
  }
  std::vector<float> queries;
  for (const std::uint16_t x : random_rows())
    queries.insert(queries.end(), 3, static_cast<float>(x % 1024) / 1024);
  QueryStatistics statistics({{{3 * kHeads, kHeads, kDim}, rotation, 0.125F}});
  statistics.add(
      0,
      TensorView::dense(
          queries.data(), DType::kFloat32, 1, 3 * kHeads, kStep, kDim),
      0);
  return statistics.finish(FilterMetadata{});
}

FilterBank filters_for(std::string_view name) {
  if (name == "expected") return query_statistics();
  const std::size_t size = name == "auto"      ? auto_size(kDim)
                           : name == "squeeze" ? 1
                                               : kDim;
  const LayerFilters filter{kHeads, size, std::vector<float>(kHeads * size, 1)};
  return {{filter}, FilterMetadata{}};
}

void BM_PolicyUpdate(benchmark::State& state, const std::string& name) {
  const std::vector<LayerShape> layers{{kHeads, kDim, kDim}};
  PolicyOptions options;
  options.budget = kBudget;
  options.protection = {4, kBudget / 2};
  SequenceCache cache(
      layers,
      policies::make(
          name,
          options,
          std::make_shared<const FilterBank>(filters_for(name)),
          layers));
  const auto data = random_rows();
  const auto rows =
      TensorView::dense(data.data(), DType::kFloat16, 1, kHeads, kStep, kDim);
  AttentionStatistics statistics;
  statistics.rows.resize(kHeads);
  for (int i = 0; i < 3; ++i)
    step(cache, rows, statistics);
  for (auto _ : state)
    step(cache, rows, statistics);
  state.SetItemsProcessed(
      state.iterations() * static_cast<std::int64_t>(kStep));
}

const bool kPolicyUpdate = [] {
  for (const policies::PolicyInfo& info : policies::all()) {
    const std::string name(info.name);
    // No rows go, or only after a second reading by the model.
    if (name == "full" || name == "reconstruct") continue;
    benchmark::RegisterBenchmark(
        ("BM_PolicyUpdate/" + name).c_str(),
        [name](benchmark::State& state) { BM_PolicyUpdate(state, name); })
        ->UseRealTime();
  }
  return true;
}();

}  // namespace
}  // namespace qfilters::bench
