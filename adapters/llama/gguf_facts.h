#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace qfilters::llama {

/// What a GGUF file says about RoPE.
struct RopeFacts {
  double freq_base = 0;
  std::size_t dimensions = 0;  ///< of a head that turn; 0: all
  std::string scaling;         ///< none, linear, yarn, ...
  std::vector<float> factors;  ///< each pair's frequency is divided by its own
};

/// What a GGUF file says about its model before any weight is loaded; empty
/// or zero where it says nothing.
struct GgufFacts {
  std::string architecture;
  std::string name;
  RopeFacts rope;
  /// RoPE factors that llama.cpp picks by the length of its context.
  bool context_dependent_rope = false;
  /// Multi-head latent attention: the cache holds no rows per head.
  bool latent_attention = false;
};

/// Throws Error kFile, without the path, for a file that cannot be read or is
/// no intact GGUF header.
[[nodiscard]] GgufFacts read_gguf_facts(const std::filesystem::path& path);

}  // namespace qfilters::llama
