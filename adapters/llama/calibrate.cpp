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
#include "qfilters/query_statistics.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "llama/engine.h"
#include "llama/filter_kind.h"
#include "llama/rope.h"

namespace qfilters::llama {
namespace {

// Rows that attention uses as sinks are unlike all others.
constexpr std::size_t kSinkRows = 8;
// Tokens of the shortest passage there is something to learn from.
constexpr std::size_t kLeastPassage = 64;

void check(const CalibrateOptions& options, std::span<const Token> tokens) {
  const auto fail = [](const std::string& reason) {
    throw Error(ErrorKind::kInvalidArgument, "calibrate: " + reason);
  };
  if (tokens.size() < 2) {
    fail("tokens=" + std::to_string(tokens.size()) + ", at least 2 are needed");
  }
  if (options.context < 1) fail("context=0");
}

void check_passage(
    const CalibrateOptions& options, std::span<const Token> tokens) {
  check(options, tokens);
  if (std::min(tokens.size(), options.context) >= kLeastPassage) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "calibrate: tokens=" + std::to_string(tokens.size()) +
          " context=" + std::to_string(options.context) + ": at least " +
          std::to_string(kLeastPassage) + " of each are needed");
}

SessionOptions session_of(const CalibrateOptions& options) {
  SessionOptions session;
  session.chunk = std::min(options.chunk, options.context);
  session.threads = options.threads;
  return session;
}

SequenceCache make_cache(const Model& model, const CalibrateOptions& options) {
  SequenceOptions sequence;
  sequence.threads = options.threads;
  return {model.layer_shapes(), Policy::full(), sequence};
}

// Reads the text once, each passage from an empty cache.
void read_passages(
    Engine& engine,
    SequenceCache& cache,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    Logits logits,
    const std::function<void(std::size_t done)>& progress) {
  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t left = options.context - cache.offset();
    const std::size_t count =
        std::min({engine.chunk(), left, tokens.size() - done});
    engine.step(cache, tokens.subspan(done, count), logits);
    done += count;
    if (cache.offset() == options.context) cache.clear();
    if (progress) progress(done);
  }
}

void sign(FilterMetadata& metadata, const Model& model, FilterKind kind) {
  metadata.model_id = model.name();
  metadata.model_fingerprint = model.fingerprint();
  metadata.query_site = query_site(kind);
}

}  // namespace

FilterBank calibrate(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check(options, tokens);
  Engine engine(std::move(model), session_of(options));
  const Model& source = engine.model();
  Calibrator calibrator(source.query_shapes());
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    calibrator.add(layer, node.queries);
  });
  SequenceCache cache = make_cache(source, options);
  read_passages(engine, cache, tokens, options, Logits::kNone, progress);
  sign(metadata, source, FilterKind::kQFilters);
  return calibrator.finish(std::move(metadata));
}

namespace {

// Below this attention a key is worth nothing, whatever the logarithm says.
constexpr float kLeastAttention = 1e-8F;
// What fluency counts beside facts: keys differ less in it.
constexpr float kFluency = 1.5F;

float median(std::vector<float> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// What keys of a passage turn out to be worth, for every global head.
class Worth {
 public:
  Worth(
      std::span<const LayerShape> layers, std::size_t tokens, std::size_t chunk)
      // Few queries come behind the last rows, none behind the last chunk.
      : rows_(std::min(tokens - tokens / 8, (tokens - 1) / chunk * chunk)) {
    for (const LayerShape& layer : layers) {
      heads_.emplace_back(
          layer.window == 0 ? layer.kv_heads : 0,
          Head{std::vector<float>(rows_), std::vector<float>(rows_)});
    }
    queries_.resize(rows_);
  }

  // Rows that are judged; those behind them are not.
  [[nodiscard]] std::size_t rows() const { return rows_; }

  // Attention of the first reading to rows before its micro-batch of `tokens`.
  void add_later(
      std::size_t layer,
      const AttentionStatistics& seen,
      std::size_t before,
      std::size_t tokens) {
    const std::size_t rows = std::min(before, rows_);
    for (std::size_t h = 0; h < heads_[layer].size(); ++h) {
      for (std::size_t r = 0; r < rows; ++r)
        heads_[layer][h].later[r] += seen.rows[h][r];
    }
    if (layer != 0) return;
    for (std::size_t r = 0; r < rows; ++r)
      queries_[r] += static_cast<float>(tokens);
  }

  // Attention of the second reading.
  void add_again(std::size_t layer, const AttentionStatistics& seen) {
    for (std::size_t h = 0; h < heads_[layer].size(); ++h) {
      std::vector<float>& again = heads_[layer][h].again;
      for (std::size_t r = 0; r < rows_; ++r)
        again[r] = std::max(again[r], seen.rows[h][r]);
    }
  }

  // Facts, then fluency, each against the median key of all heads: as many
  // keys are worth their place for one as for the other.
  void teach(const SequenceCache& cache, KeyRegression& regression) const {
    std::vector<float> facts;
    std::vector<float> fluency;
    for (const std::vector<Head>& layer : heads_) {
      for (const Head& head : layer) {
        for (std::size_t r = kSinkRows; r < rows_; ++r) {
          facts.push_back(std::log(head.again[r] + kLeastAttention));
          fluency.push_back(
              std::log(head.later[r] / queries_[r] + kLeastAttention));
        }
      }
    }
    if (facts.empty()) return;  // no layer is global
    const float usual_fact = median(facts);
    const float usual_fluency = median(fluency);
    const std::size_t judged = rows_ - kSinkRows;
    std::vector<float> keys;
    std::vector<float> worth(2 * judged);
    std::size_t first = 0;
    for (std::size_t l = 0; l < heads_.size(); ++l) {
      for (std::size_t h = 0; h < heads_[l].size(); ++h, first += judged) {
        const RowsView view = cache.rows(l);
        const std::size_t dim = view.shape().key_dim;
        keys.resize(view.rows(h) * dim);
        read_keys(view, h, keys);
        for (std::size_t i = 0; i < judged; ++i) {
          worth[i] = facts[first + i] - usual_fact;
          worth[judged + i] = kFluency * (fluency[first + i] - usual_fluency);
        }
        regression.add(
            l,
            h,
            std::span(keys).subspan(kSinkRows * dim, judged * dim),
            worth);
      }
    }
  }

 private:
  struct Head {
    std::vector<float> later;  // the sum
    std::vector<float> again;  // the largest
  };

  std::size_t rows_;
  std::vector<std::vector<Head>> heads_;  // [layer][head]
  std::vector<float> queries_;            // behind each row
};

}  // namespace

FilterBank calibrate_reconstruction(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    std::span<const Token> cue,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check_passage(options, tokens);
  // Rows learn from later micro-batches, so there must be some.
  SessionOptions session = session_of(options);
  session.chunk =
      std::min(session.chunk, std::min(tokens.size(), options.context) / 8);
  Engine engine(std::move(model), session);
  const Model& source = engine.model();
  const std::vector<LayerShape> shapes = source.layer_shapes();
  std::vector<KeyShape> keys;
  for (const LayerShape& shape : shapes)
    keys.push_back({shape.kv_heads, shape.key_dim});
  KeyRegression regression(keys, 2);
  SequenceCache cache = make_cache(source, options);
  const auto feed = [&](std::span<const Token> all, std::size_t before) {
    for (std::size_t i = 0; i < all.size(); i += engine.chunk()) {
      const auto part =
          all.subspan(i, std::min(engine.chunk(), all.size() - i));
      engine.step(cache, part, Logits::kNone);
      if (progress) progress(before + (i + part.size()) / 2);
    }
  };
  for (std::size_t begin = 0; begin < tokens.size(); begin += options.context) {
    const auto passage =
        tokens.subspan(begin, std::min(options.context, tokens.size() - begin));
    // The rest of a text may be too short to learn from.
    if (passage.size() < kLeastPassage) continue;
    Worth worth(shapes, passage.size(), engine.chunk());
    if (worth.rows() <= kSinkRows) continue;
    const std::size_t end = passage.size();
    engine.on_statistics(
        AttentionStatistics::Kind::kSum,
        0,
        [&](std::size_t layer, const AttentionStatistics& seen) {
          const std::size_t before = cache.offset();
          worth.add_later(
              layer, seen, before, std::min(engine.chunk(), end - before));
        });
    feed(passage, begin);
    engine.on_statistics(
        AttentionStatistics::Kind::kMax,
        0,
        [&](std::size_t layer, const AttentionStatistics& seen) {
          worth.add_again(layer, seen);
        });
    feed(cue, begin + passage.size() / 2);
    feed(passage, begin + passage.size() / 2);
    engine.on_statistics({}, 0, {});
    worth.teach(cache, regression);
    cache.clear();
  }
  sign(metadata, source, FilterKind::kAuto);
  return regression.finish(std::move(metadata));
}

namespace {

// Enough positions to tell one RoPE from another.
constexpr std::size_t kProbeTokens = 64;

// A text of one token makes the same queries at every position but for RoPE, in
// every layer: attention averages values that are all the same.
void check_rotations(Engine& engine, const std::vector<Rotation>& rotations) {
  const Model& model = engine.model();
  constexpr double kTolerance = 0.02;  // of a query's length; weights are 4 bit
  SequenceCache cache(model.layer_shapes(), Policy::full());
  std::vector<std::vector<float>> first(rotations.size());
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    const TensorView& queries = node.queries;
    if (model.layers()[layer].window != 0) return;
    const std::vector<float> rows = turn_back(
        rotations[layer], queries, static_cast<std::int32_t>(cache.offset()));
    const std::size_t dim = queries.dim;
    for (std::size_t h = 0; h < queries.heads; ++h) {
      for (std::size_t t = 0; t < queries.tokens; ++t) {
        const auto row =
            std::span(rows).subspan((h * queries.tokens + t) * dim, dim);
        if (cache.offset() == 0 && t == 0)
          first[layer].insert(first[layer].end(), row.begin(), row.end());
        double difference = 0;
        double length = 0;
        for (std::size_t d = 0; d < dim; ++d) {
          const auto want = static_cast<double>(first[layer][h * dim + d]);
          const double off = static_cast<double>(row[d]) - want;
          difference += off * off;
          length += want * want;
        }
        if (difference <= kTolerance * kTolerance * length) continue;
        throw Error(
            ErrorKind::kUnsupported,
            "calibrate: the RoPE of " + model.name() +
                " is not understood: layer " + std::to_string(layer) +
                " turns queries otherwise than the file says");
      }
    }
  });
  const std::vector<Token> same(
      engine.chunk(), static_cast<Token>(model.vocabulary() / 2));
  while (cache.offset() < kProbeTokens) {
    const std::size_t count =
        std::min(same.size(), kProbeTokens - cache.offset());
    engine.step(cache, std::span(same).first(count), Logits::kNone);
  }
}

}  // namespace

FilterBank calibrate_expected(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check_passage(options, tokens);
  Engine engine(std::move(model), session_of(options));
  const Model& source = engine.model();
  const std::vector<Rotation> rotations = rotations_of(source);
  check_rotations(engine, rotations);
  const std::vector<QueryShape> shapes = source.query_shapes();
  std::vector<QueryLayer> layers;
  for (std::size_t l = 0; l < shapes.size(); ++l)
    layers.push_back({shapes[l], rotations[l], source.layers()[l].scale});
  QueryStatistics statistics(std::move(layers));
  SequenceCache cache = make_cache(source, options);
  engine.on_node([&](std::size_t layer, const AttentionNode& node) {
    const TensorView& queries = node.queries;
    if (source.layers()[layer].window != 0) return;
    const std::size_t skip = kSinkRows - std::min(kSinkRows, cache.offset());
    if (skip >= queries.tokens) return;
    TensorView others = queries;
    others.data = queries.row(0, 0, skip);
    others.tokens -= skip;
    statistics.add(
        layer, others, static_cast<std::int32_t>(cache.offset() + skip));
  });
  read_passages(engine, cache, tokens, options, Logits::kNone, progress);
  sign(metadata, source, FilterKind::kExpected);
  return statistics.finish(std::move(metadata));
}

namespace {

double cosine(const float* a, const float* b, std::size_t size) noexcept {
  double dot = 0;
  double length_a = 0;
  double length_b = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    dot += x * y;
    length_a += x * x;
    length_b += y * y;
  }
  const double lengths = std::sqrt(length_a * length_b);
  return lengths > 0 ? dot / lengths : 0;
}

}  // namespace

FilterBank calibrate_squeeze(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress) {
  check(options, tokens);
  Engine engine(std::move(model), session_of(options));
  const Model& source = engine.model();
  const std::span<const AttentionLayer> layers = source.layers();
  std::vector<double> sums(layers.size());
  std::vector<std::size_t> seen(layers.size());
  engine.on_blocks([&](std::size_t layer,
                       const TensorView& before,
                       const TensorView& after) {
    for (std::size_t t = 0; t < before.tokens; ++t) {
      sums[layer] += cosine(
          static_cast<const float*>(before.row(0, 0, t)),
          static_cast<const float*>(after.row(0, 0, t)),
          before.dim);
    }
    seen[layer] += before.tokens;
  });
  SequenceCache cache = make_cache(source, options);
  // The last layer goes on with tokens that have logits alone.
  read_passages(engine, cache, tokens, options, Logits::kAll, progress);
  std::vector<LayerFilters> out;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (seen[l] != tokens.size()) {
      throw Error(
          ErrorKind::kUnsupported,
          "calibrate: the graph of " + source.name() + " shows the residual " +
              "stream around attention for " + std::to_string(seen[l]) +
              " of " + std::to_string(tokens.size()) + " tokens in layer " +
              std::to_string(l) + ", which policy squeeze needs");
    }
    const double mean = sums[l] / static_cast<double>(seen[l]);
    out.push_back(
        {layers[l].kv_heads,
         1,
         std::vector<float>(layers[l].kv_heads, static_cast<float>(mean))});
  }
  sign(metadata, source, FilterKind::kSqueeze);
  metadata.n_samples = tokens.size();
  return {std::move(out), std::move(metadata)};
}

}  // namespace qfilters::llama
