#include <cstdio>
#include <qfilters/qfilters.h>

int main() {
  qfilters::LayerFilters filters{2, 64, std::vector<float>(2 * 64, 0.125F)};
  qfilters::QFiltersKVCache cache({.qfilters_budget = 128}, filters);
  std::vector<float> kv(2 * 1000 * 64, 0.5F), q(8 * 1000 * 64, 0.1F), out(q.size());
  auto view = [](auto& v, size_t heads) { return qfilters::TensorView::dense(v.data(), qfilters::DType::kFloat32, 1, heads, 1000, 64); };
  qfilters::RowsView rows = cache.update_and_fetch(view(kv, 2), view(kv, 2));
  qfilters::attend(view(q, 8), rows, {}, qfilters::OutputView::dense(out.data(), 1, 8, 1000, 64));
  std::printf("%zu tokens seen, %zu rows kept per head\n", cache.offset(), cache.tokens_kept());
}
