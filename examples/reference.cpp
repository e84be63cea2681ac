#include <cstdio>
#include <random>
#include <vector>

#include <qfilters/qfilters.h>

using namespace qfilters;

constexpr size_t kHeads = 2, kDim = 64;

// Keys or values of one layer: [1, kHeads, tokens, kDim].
struct Rows {
  size_t tokens;
  std::vector<float> data = std::vector<float>(kHeads * tokens * kDim);

  // Tokens [first, first + count) of all heads; nothing is copied.
  TensorView view(size_t first, size_t count) const {
    TensorView all = TensorView::dense(
        data.data(), DType::kFloat32, 1, kHeads, tokens, kDim);
    all.data = all.row(0, 0, first);
    all.tokens = count;
    return all;
  }
};

int main() {
  std::mt19937 random(1);
  auto fill = [&](std::vector<float>& to) {
    for (float& x : to)
      x = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
  };
  Rows kv{600};
  fill(kv.data);

  // Calibrate: queries of 4 query heads, 2 for each KV head, as attention uses
  // them.
  Calibrator calibrator({{.query_heads = 4, .kv_heads = kHeads, .dim = kDim}});
  std::vector<float> queries(4 * 500 * kDim);
  fill(queries);
  calibrator.add(
      0, TensorView::dense(queries.data(), DType::kFloat32, 1, 4, 500, kDim));
  FilterBank filters = calibrator.finish({.model_id = "example"});

  // One cache per attention layer; the second layer of this model has none.
  Config config{
      .qfilters_budget = 100, .qfilters_n_sink = 4, .qfilters_recent = 16};
  ModelShape model{{ModelShape::Attention{kHeads, kDim}, std::nullopt}, ""};
  auto caches = CacheBuilder::for_model(model, config, &filters);
  QFiltersKVCache& prefill = *caches[0];
  prefill.on_warning([](std::string_view text) {
    std::printf("warning: %.*s\n", int(text.size()), text.data());
  });

  // The call returns every prior kept row and every new one; then it evicts.
  RowsView seen = prefill.update_and_fetch(kv.view(0, 600), kv.view(0, 600));
  std::printf(
      "%zu rows returned, %zu kept of %zu\n",
      seen.rows(0),
      prefill.tokens_kept(),
      prefill.offset());
  std::printf(
      "%llu of %llu bytes, %.2f times smaller\n",
      (unsigned long long)prefill.qfilters_kept_bytes(),
      (unsigned long long)prefill.full_seq_bytes(),
      prefill.compression_ratio());

  // Token by token gives the same rows as one block.
  QFiltersKVCache decode(config, filters.layer(0));
  for (size_t t = 0; t < 600; ++t)
    decode.update_and_fetch(kv.view(t, 1), kv.view(t, 1));
  std::printf(
      "path-independent: %s\n",
      decode.positions() == prefill.positions() ? "yes" : "no");

  // What a head holds.
  QFiltersState head = prefill.states()[1];
  std::printf(
      "head 1: %zu rows, first at %d, last at %d\n",
      head.positions.size(),
      head.positions.front(),
      head.positions.back());

  // Without filters: nothing is evicted before qfilters_calib_tokens, then the
  // keys' main axis is frozen.
  QFiltersKVCache fallback(config);
  fallback.update_and_fetch(kv.view(0, 127), kv.view(0, 127));
  std::printf("fallback: %zu rows after 127 tokens,", fallback.tokens_kept());
  fallback.update_and_fetch(kv.view(127, 1), kv.view(127, 1));
  std::printf(" %zu after 128\n", fallback.tokens_kept());

  // "raise": the update is complete, then the error comes, once.
  config.qfilters_on_low_retention = "raise";
  QFiltersKVCache strict(config, filters.layer(0));
  try {
    strict.update_and_fetch(kv.view(0, 600), kv.view(0, 600));
  } catch (const Error& error) {
    std::printf("raised at offset %zu: %s\n", strict.offset(), error.what());
  }

  // Saved in one process, continued in another.
  QFiltersKVCache later(config, filters.layer(0));
  later.restore(strict.save());
  std::printf(
      "restored: %zu tokens, %zu rows\n", later.offset(), later.tokens_kept());
}
