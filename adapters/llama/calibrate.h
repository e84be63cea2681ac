#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "qfilters/filter_bank.h"

#include "llama/model.h"

namespace qfilters::llama {

struct CalibrateOptions {
  std::size_t context = 4096;  ///< tokens of one independent passage
  std::size_t chunk = 256;     ///< tokens per micro-batch
  int threads = 1;
};

/// Q-Filters from the queries that attention really multiplies with cached
/// keys (after QK-norm and RoPE), over `tokens` cut into passages of `context`
/// tokens, each attended in full. metadata gets the model's identity, the query
/// site and the row count; the caller fills in dataset and text hash.
/// Deterministic; the chunk changes results only by rounding. Throws Error
/// kInvalidArgument for fewer than 2 tokens.
[[nodiscard]] FilterBank calibrate(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress = {});

/// Coefficients of policy auto (KeyRegression): each passage is read, then
/// `cue` and the passage once more (teacher forced), which is what KVzip
/// (arXiv:2505.23416) does with every prompt. A key of a global layer is worth,
/// as a fact, the logarithm of the largest attention that the second reading
/// pays it, and for fluency 1.5 times that of the mean attention from later
/// micro-batches of the first reading, each less its median over all global
/// heads of the passage. The first rows, which attention uses as sinks, and the
/// last eighth of a passage, which little comes after, are left out.
/// Micro-batches have at most an eighth of a passage; where the last passage is
/// shorter, the keys of its last micro-batch are left out, too. About twice the
/// time of calibrate(), memory of one passage's full cache. Throws as it, for
/// fewer than 64 tokens or a context below 64.
[[nodiscard]] FilterBank calibrate_reconstruction(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    std::span<const Token> cue,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress = {});

/// Statistics of policy expected (QueryStatistics), in one pass over the same
/// passages as calibrate(), their first rows left out; the RoPE of the model is
/// read from its file and tried out on a text of one token. Memory of one
/// passage's full cache. Throws as calibrate_reconstruction(), and kUnsupported
/// for a model whose RoPE is not understood.
[[nodiscard]] FilterBank calibrate_expected(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress = {});

/// Similarities of policy squeeze (arXiv:2404.04793), in one pass over the same
/// passages: for each layer the cosine of the residual stream before and after
/// its attention block, averaged over tokens; [kv_heads, 1] a layer, the same
/// for all its heads. Throws as calibrate(), and Error kUnsupported for a model
/// whose graph does not show the stream.
[[nodiscard]] FilterBank calibrate_squeeze(
    std::shared_ptr<const Model> model,
    std::span<const Token> tokens,
    const CalibrateOptions& options,
    FilterMetadata metadata,
    const std::function<void(std::size_t done)>& progress = {});

}  // namespace qfilters::llama
