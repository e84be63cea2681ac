// save() and restore() of a SequenceCache.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/limits.h"
#include "qfilters/sequence_cache.h"

#include "core/byte_io.h"
#include "core/sequence_layer.h"

namespace qfilters {

namespace {

void write_group(ByteWriter& out, const KVStore& store, std::size_t group) {
  const auto positions = store.positions(group);
  const RowShape& shape = store.shape();
  out.put(std::uint64_t{positions.size()});
  out.put_array(positions);
  out.put_array(store.scores(group));
  std::vector<std::byte> row(shape.row_bytes());
  for (std::size_t r = 0; r < positions.size(); ++r) {
    store.save_row(group, r, row.data());
    out.put_array<std::byte>(row);
  }
}

// Positions must be what a run could have left, or later code would trip.
void check_positions(
    std::vector<std::int32_t> positions,
    std::size_t offset,
    std::size_t window,
    RowOrder order) {
  if (order == RowOrder::kSlot && window == 0) {
    std::sort(positions.begin(), positions.end());
  }
  const auto unordered = std::adjacent_find(
      positions.begin(), positions.end(), std::greater_equal<>());
  bool sound = unordered == positions.end() &&
               (positions.empty() || positions.front() >= 0) &&
               (positions.empty() ||
                static_cast<std::size_t>(positions.back()) < offset);
  if (window != 0 && sound) {  // the newest tokens, from a block's start
    const std::size_t first = offset - positions.size();
    sound = first % kBlockRows == 0 &&
            positions.size() >= std::min(offset, window - 1) &&
            (positions.empty() ||
             static_cast<std::size_t>(positions.front()) == first);
  }
  if (!sound) {
    throw Error(
        ErrorKind::kFile, "restore: the positions of the rows make no sense");
  }
}

// Reads what save() wrote of the sequence's kind and throws where it is
// another, naming what one side has and the other has not: what is usual is not
// named.
void check_identity(ByteReader& in, const std::vector<std::string>& own) {
  std::vector<std::string> saved;
  const auto count = in.get<std::uint64_t>();
  while (saved.size() < count)
    saved.push_back(in.get_text());
  if (saved == own) return;
  const auto beyond = [](const std::vector<std::string>& words,
                         const std::vector<std::string>& others) {
    for (const std::string& word : words) {
      if (std::find(others.begin(), others.end(), word) == others.end())
        return "'" + word + "'";
    }
    return std::string("no such thing");
  };
  throw Error(
      ErrorKind::kMismatch,
      "restore: the saved state has " + beyond(saved, own) +
          ", this cache has " + beyond(own, saved));
}

}  // namespace

std::vector<std::string> SequenceCache::identity() const {
  std::vector<std::string> out;
  const PolicyOptions& options = policy_.options();
  out.push_back("policy " + std::string(policy_.name()));
  if (policy_.bounded()) {
    out.push_back("scorer " + policy_.scorer()->identity());
    out.push_back("budget " + std::to_string(options.budget));
    out.push_back("sinks " + std::to_string(options.protection.sinks));
    out.push_back("recent " + std::to_string(options.protection.recent));
    out.push_back("interval " + std::to_string(options.interval));
    // What was once the only way is not named.
    if (options.rule != BudgetRule::kUniform) {
      out.push_back(std::string("rule ") + to_string(options.rule));
      out.push_back("least " + std::to_string(policy_.least_rows()));
    }
    for (std::size_t l = 0; l < options.layer_budgets.size(); ++l) {
      out.push_back(
          "budget of layer " + std::to_string(l) + " " +
          std::to_string(options.layer_budgets[l]));
    }
    if (options.block != 1) {
      out.push_back("block " + std::to_string(options.block));
    }
    if (options.merger != nullptr) {
      out.push_back("merger " + options.merger->identity());
    }
  }
  out.push_back(std::string("dtype ") + to_string(options_.dtype));
  if (options_.format != RowFormat::kSame) {
    out.back() += std::string(", stored as ") + to_string(options_.format);
  }
  if (options_.order == RowOrder::kSlot) out.emplace_back("order slot");
  out.push_back("batch " + std::to_string(options_.batch));
  out.push_back("layers " + std::to_string(shapes_.size()));
  for (const LayerShape& shape : shapes_) {
    out.push_back(
        "layer of kv_heads=" + std::to_string(shape.kv_heads) +
        " key_dim=" + std::to_string(shape.key_dim) +
        " value_dim=" + std::to_string(shape.value_dim) +
        " window=" + std::to_string(shape.window));
  }
  return out;
}

Snapshot SequenceCache::save() const {
  if (open_) {
    throw Error(ErrorKind::kInvalidArgument, "save: a micro-batch is open");
  }
  ByteWriter out;
  const auto words = identity();
  out.put(std::uint64_t{words.size()});
  for (const std::string& word : words)
    out.put_text(word);
  out.put(std::uint64_t{offset_});
  out.put(counters_.evictions);
  out.put(counters_.rows_evicted);
  out.put(counters_.non_finite_scores);
  if (policy_.rehearses()) {
    out.put(std::uint64_t{rehearsed_});
    out.put(std::uint64_t{ready_to_evict_});
  }
  for (const auto& layer : layers_) {
    for (std::size_t g = 0; g < layer->store.shape().groups(); ++g) {
      write_group(out, layer->store, g);
    }
  }
  Snapshot snapshot;
  snapshot.put(kSequencePart, out.take());
  return snapshot;
}

std::unique_ptr<SequenceCache::Layer> SequenceCache::read_layer(
    ByteReader& in, std::size_t layer, std::size_t offset) {
  const RowShape& shape = layers_[layer]->store.shape();
  auto out = std::make_unique<Layer>(pool_, shape);
  for (std::size_t g = 0; g < shape.groups(); ++g) {
    const auto rows = in.get<std::uint64_t>();
    const auto positions = in.get_array<std::int32_t>(rows);
    const auto scores = in.get_array<float>(rows);
    check_positions(positions, offset, shapes_[layer].window, options_.order);
    if (positions.size() > in.left() / shape.row_bytes()) {
      throw Error(
          ErrorKind::kFile,
          "restore: " + std::to_string(positions.size()) +
              " rows are announced, but their data is missing");
    }
    out->store.reserve(g, positions.size());
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const auto row = in.get_array<std::byte>(shape.row_bytes());
      out->store.append_saved_row(g, row.data(), positions[r], scores[r]);
    }
  }
  return out;
}

void SequenceCache::restore(const Snapshot& saved) {
  if (open_) {
    throw Error(ErrorKind::kInvalidArgument, "restore: a micro-batch is open");
  }
  ByteReader in(saved.bytes(kSequencePart));
  check_identity(in, identity());
  const auto offset = in.get<std::uint64_t>();
  if (offset > kMostTokens) {
    throw Error(
        ErrorKind::kFile,
        "restore: offset " + std::to_string(offset) + " exceeds int32");
  }
  SequenceStats counters;
  counters.evictions = in.get<std::uint64_t>();
  counters.rows_evicted = in.get<std::uint64_t>();
  counters.non_finite_scores = in.get<std::uint64_t>();
  std::uint64_t rehearsed = 0;
  std::uint64_t ready = 0;
  if (policy_.rehearses()) {
    rehearsed = in.get<std::uint64_t>();
    ready = in.get<std::uint64_t>();
    if (rehearsed > offset || ready > 1) {
      throw Error(
          ErrorKind::kFile,
          "restore: " + std::to_string(rehearsed) + " of " +
              std::to_string(offset) + " tokens read again make no sense");
    }
  }
  std::vector<std::unique_ptr<Layer>> layers;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    layers.push_back(read_layer(in, l, offset));
    const RowShape& shape = layers.back()->store.shape();
    counters.kv_bytes_full += shape.groups() * shape.row_bytes() * offset;
  }
  in.finish();
  layers_ = std::move(layers);
  offset_ = offset;
  rehearsed_ = rehearsed;
  ready_to_evict_ = ready == 1;
  counters_ = counters;
}

}  // namespace qfilters
