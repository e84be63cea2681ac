#include "llama/calibrate.h"

#include <algorithm>
#include <utility>

#include "qfilters/calibrator.h"
#include "qfilters/error.h"
#include "qfilters/policy.h"
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
  engine.on_queries([&](std::size_t layer, const TensorView& queries) {
    calibrator.add(layer, queries);
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
    if (have.heads == layers[l].kv_heads && have.dim == layers[l].key_dim) {
      continue;
    }
    fail(
        "layer " + std::to_string(l) + ": the filters have " +
        std::to_string(have.heads) + " heads of " + std::to_string(have.dim) +
        ", " + model.name() + " has " + std::to_string(layers[l].kv_heads) +
        " of " + std::to_string(layers[l].key_dim));
  }
  check_origin(filters.metadata(), {.model_fingerprint = model.fingerprint()});
}

}  // namespace qfilters::llama
