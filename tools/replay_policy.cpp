// Says which rows a policy keeps of a text whose queries, keys and values were
// recorded elsewhere:
//   replay_policy POLICY BUDGET SINKS RECENT LAYERS QUERY_HEADS KV_HEADS TOKENS
//                 DIM FOLDER [FILTERS]
// reads q.bin (float32), k.bin and v.bin (float16), each [layers, heads,
// tokens, dim] and little-endian, as one micro-batch. One line for each head of
// each layer: the positions kept. Policy snapkv-mean is snapkv with a window of
// 64 queries and the mean of 5 neighbours.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/filter_file.h"
#include "qfilters/sequence_cache.h"

#include "policies/registry.h"
#include "policies/scorers.h"

namespace {

using namespace qfilters;

struct Shape {
  std::size_t layers, query_heads, kv_heads, tokens, dim;
};

template <typename T>
std::vector<T> read(const std::filesystem::path& path, std::size_t count) {
  std::vector<T> out(count);
  std::ifstream file(path, std::ios::binary);
  file.read(
      reinterpret_cast<char*>(out.data()),
      static_cast<std::streamsize>(count * sizeof(T)));
  if (!file || file.peek() != std::ifstream::traits_type::eof())
    throw std::runtime_error(path.string() + " has not the size it should");
  return out;
}

Policy policy_of(
    const std::string& name,
    const PolicyOptions& options,
    const char* filters,
    const std::vector<LayerShape>& layers) {
  if (name == "snapkv-mean") {
    const policies::SnapOptions snap{64, 5, policies::Pooling::kMean};
    return Policy::custom(
        policies::make_snapkv_scorer("snapkv", snap), options);
  }
  const auto bank =
      filters == nullptr
          ? nullptr
          : std::make_shared<const FilterBank>(load_filters(filters));
  return policies::make(name, options, bank, layers);
}

void feed(
    SequenceCache& cache,
    const Shape& shape,
    const std::filesystem::path& folder) {
  const std::size_t head = shape.tokens * shape.dim;
  const std::size_t rows = shape.layers * shape.kv_heads * head;
  const auto queries =
      read<float>(folder / "q.bin", shape.layers * shape.query_heads * head);
  const auto keys = read<std::uint16_t>(folder / "k.bin", rows);
  const auto values = read<std::uint16_t>(folder / "v.bin", rows);
  std::vector<float> out(shape.query_heads * head);
  const auto view =
      [&](const auto& from, DType type, std::size_t heads, std::size_t layer) {
        return TensorView::dense(
            from.data() + layer * heads * head,
            type,
            1,
            heads,
            shape.tokens,
            shape.dim);
      };
  cache.begin(shape.tokens);
  for (std::size_t l = 0; l < shape.layers; ++l) {
    cache.append(
        l,
        view(keys, DType::kFloat16, shape.kv_heads, l),
        view(values, DType::kFloat16, shape.kv_heads, l));
    const auto needs = cache.attention_needs(l);
    if (!needs) continue;
    AttentionStatistics statistics{needs->kind, needs->last_queries, {}};
    attend(
        view(queries, DType::kFloat32, shape.query_heads, l),
        cache.rows(l),
        {},
        OutputView::dense(
            out.data(), 1, shape.query_heads, shape.tokens, shape.dim),
        &statistics);
    cache.observe(l, statistics);
  }
  cache.commit();
}

int replay(const std::vector<std::string>& words) {
  if (words.size() != 10 && words.size() != 11) {
    std::cerr << "usage: replay_policy POLICY BUDGET SINKS RECENT LAYERS "
                 "QUERY_HEADS KV_HEADS TOKENS DIM FOLDER [FILTERS]\n";
    return 2;
  }
  const auto number = [&](std::size_t i) {
    return static_cast<std::size_t>(std::stoull(words[i]));
  };
  const Shape shape{number(4), number(5), number(6), number(7), number(8)};
  PolicyOptions options;
  options.budget = number(1);
  options.protection = {number(2), number(3)};
  const std::vector<LayerShape> layers(
      shape.layers, LayerShape{shape.kv_heads, shape.dim, shape.dim, 0});
  SequenceCache cache(
      layers,
      policy_of(
          words[0],
          options,
          words.size() == 11 ? words[10].c_str() : nullptr,
          layers));
  feed(cache, shape, words[9]);
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      for (const std::int32_t position : cache.store(l).positions(h))
        std::cout << position << ' ';
      std::cout << '\n';
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return replay(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::cerr << "replay_policy: " << error.what() << '\n';
    return 2;
  }
}
