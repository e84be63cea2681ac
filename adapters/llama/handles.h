#pragma once

#include <memory>

struct llama_context;
struct llama_model;

namespace qfilters::llama {

struct ContextDeleter {
  void operator()(llama_context* context) const noexcept;
};

struct ModelDeleter {
  void operator()(llama_model* model) const noexcept;
};

/// Owners of llama.cpp's objects. A context must go before its model.
using ContextHandle = std::unique_ptr<llama_context, ContextDeleter>;
using ModelHandle = std::unique_ptr<llama_model, ModelDeleter>;

}  // namespace qfilters::llama
