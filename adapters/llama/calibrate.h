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

/// Throws Error kMismatch, naming the values, when filters do not belong to
/// the model: other layers, heads or head dims, or a known fingerprint that
/// differs.
void check_filters(const FilterBank& filters, const Model& model);

}  // namespace qfilters::llama
