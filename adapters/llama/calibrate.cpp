#include "llama/calibrate.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/attention.h"
#include "qfilters/calibrator.h"
#include "qfilters/error.h"
#include "qfilters/key_regression.h"
#include "qfilters/policy.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "llama/engine.h"

namespace qfilters::llama {
namespace {

void check(const CalibrateOptions& options, std::span<const Token> tokens) {
  const auto fail = [](const std::string& reason) {
    throw Error(ErrorKind::kInvalidArgument, "calibrate: " + reason);
  };
  if (tokens.size() < 2) {
    fail("tokens=" + std::to_string(tokens.size()) + ", at least 2 are needed");
  }
  if (options.context < 1) fail("context=0");
}

}  // namespace

FilterBank calibrate(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check(options, tokens);
  SessionOptions session;
  session.chunk = std::min(options.chunk, options.context);
  session.threads = options.threads;
  Engine engine(std::move(model), session);
  const Model& source = engine.model();
  Calibrator calibrator(source.query_shapes());
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    calibrator.add(layer, node.queries);
  });
  SequenceOptions sequence;
  sequence.threads = options.threads;
  SequenceCache cache(source.layer_shapes(), Policy::full(), sequence);

  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t left = options.context - cache.offset();
    const std::size_t count =
        std::min({session.chunk, left, tokens.size() - done});
    engine.step(cache, tokens.subspan(done, count), Logits::kNone);
    done += count;
    if (cache.offset() == options.context) cache.clear();
    if (progress) progress(done);
  }
  metadata.model_id = source.name();
  metadata.model_fingerprint = source.fingerprint();
  metadata.query_site = "attention";
  return calibrator.finish(std::move(metadata));
}

namespace {

// What FilterMetadata::query_site says of the other kind of filters.
constexpr const char* kReconstruction = "reconstruction";
// Rows that attention uses as sinks are unlike all others.
constexpr std::size_t kSinkRows = 8;
// Tokens of the shortest passage there is something to learn from.
constexpr std::size_t kLeastPassage = 64;
// Below this attention a key is worth nothing, whatever the logarithm says.
constexpr float kLeastAttention = 1e-8F;

// The largest attention paid to the first rows of every global head.
class Worth {
 public:
  Worth(std::span<const LayerShape> layers, std::size_t rows) : rows_(rows) {
    for (const LayerShape& layer : layers) {
      worth_.emplace_back(
          layer.window == 0 ? layer.kv_heads : 0, std::vector<float>(rows));
    }
  }

  void add(std::size_t layer, const AttentionStatistics& seen) {
    for (std::size_t h = 0; h < worth_[layer].size(); ++h) {
      for (std::size_t r = 0; r < rows_; ++r) {
        worth_[layer][h][r] = std::max(worth_[layer][h][r], seen.rows[h][r]);
      }
    }
  }

  void teach(const SequenceCache& cache, KeyRegression& regression) {
    std::vector<float> keys;
    for (std::size_t l = 0; l < worth_.size(); ++l) {
      for (std::size_t h = 0; h < worth_[l].size(); ++h) {
        const RowsView rows = cache.rows(l);
        const std::size_t dim = rows.shape().key_dim;
        keys.resize(rows.rows(h) * dim);
        read_keys(rows, h, keys);
        for (float& worth : worth_[l][h])
          worth = std::log(worth + kLeastAttention);
        regression.add(
            l,
            h,
            std::span(keys).subspan(kSinkRows * dim, (rows_ - kSinkRows) * dim),
            std::span(worth_[l][h]).subspan(kSinkRows));
      }
    }
  }

 private:
  std::size_t rows_;
  std::vector<std::vector<std::vector<float>>> worth_;  // [layer][head][row]
};

}  // namespace

FilterBank calibrate_reconstruction(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    std::span<const Token> cue,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check(options, tokens);
  if (std::min(tokens.size(), options.context) < kLeastPassage) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "calibrate: tokens=" + std::to_string(tokens.size()) +
            " context=" + std::to_string(options.context) + ": at least " +
            std::to_string(kLeastPassage) + " of each are needed");
  }
  SessionOptions session;
  session.chunk = std::min(options.chunk, options.context);
  session.threads = options.threads;
  Engine engine(std::move(model), session);
  const Model& source = engine.model();
  const std::vector<LayerShape> shapes = source.layer_shapes();
  std::vector<KeyShape> keys;
  for (const LayerShape& shape : shapes)
    keys.push_back({shape.kv_heads, shape.key_dim});
  KeyRegression regression(keys);
  SequenceOptions sequence;
  sequence.threads = options.threads;
  SequenceCache cache(shapes, Policy::full(), sequence);
  const auto feed = [&](std::span<const Token> all, std::size_t before) {
    for (std::size_t i = 0; i < all.size(); i += session.chunk) {
      const auto part = all.subspan(i, std::min(session.chunk, all.size() - i));
      engine.step(cache, part, Logits::kNone);
      if (progress) progress(before + (i + part.size()) / 2);
    }
  };
  for (std::size_t begin = 0; begin < tokens.size(); begin += options.context) {
    const auto passage =
        tokens.subspan(begin, std::min(options.context, tokens.size() - begin));
    // The rest of a text may be too short to learn from.
    if (passage.size() < kLeastPassage) continue;
    feed(passage, begin);
    Worth worth(shapes, passage.size());
    engine.on_statistics(
        AttentionStatistics::Kind::kMax,
        0,
        [&](std::size_t layer, const AttentionStatistics& seen) {
          worth.add(layer, seen);
        });
    feed(cue, begin + passage.size() / 2);
    feed(passage, begin + passage.size() / 2);
    engine.on_statistics({}, 0, {});
    worth.teach(cache, regression);
    cache.clear();
  }
  metadata.model_id = source.name();
  metadata.model_fingerprint = source.fingerprint();
  metadata.query_site = kReconstruction;
  return regression.finish(std::move(metadata));
}

bool is_for_auto(const FilterMetadata& metadata) noexcept {
  return metadata.query_site == kReconstruction;
}

void check_filters(const FilterBank& filters, const Model& model) {
  const auto fail = [&](const std::string& reason) {
    throw Error(ErrorKind::kMismatch, "check_filters: " + reason);
  };
  const std::span<const AttentionLayer> layers = model.layers();
  if (filters.layers() != layers.size()) {
    fail(
        "the filters have " + std::to_string(filters.layers()) + " layers, " +
        model.name() + " has " + std::to_string(layers.size()));
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerFilters& have = filters.layer(l);
    const std::size_t size = is_for_auto(filters.metadata())
                                 ? quadratic_size(layers[l].key_dim)
                                 : layers[l].key_dim;
    if (have.heads == layers[l].kv_heads && have.dim == size) continue;
    fail(
        "layer " + std::to_string(l) + ": the filters have " +
        std::to_string(have.heads) + " heads of " + std::to_string(have.dim) +
        ", " + model.name() + " has " + std::to_string(layers[l].kv_heads) +
        " of " + std::to_string(size));
  }
  check_origin(filters.metadata(), {.model_fingerprint = model.fingerprint()});
}

}  // namespace qfilters::llama
