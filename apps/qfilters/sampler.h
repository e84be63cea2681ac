#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "llama/model.h"

namespace qfilters::cli {

struct SamplerOptions {
  double temperature = 0.8;  ///< 0: always the most likely token
  std::size_t top_k = 40;    ///< 0: no limit
  double top_p = 0.95;       ///< 1: no limit
  std::uint64_t seed = 0;
};

/// Picks tokens: top-k, then temperature, then top-p. The same logits and seed
/// give the same tokens with every standard library: std::mt19937_64 is
/// specified to the bit, std's distributions are not and are not used.
class Sampler {
 public:
  /// Tokens in `banned` are never picked. Throws Error kInvalidArgument for a
  /// negative temperature or top_p outside (0, 1].
  Sampler(const SamplerOptions& options, std::vector<llama::Token> banned);

  [[nodiscard]] llama::Token pick(std::span<const float> logits);

  /// Where the random numbers are, in the text form that the standard gives
  /// std::mt19937_64.
  [[nodiscard]] std::string state() const;
  /// Continues there. Throws Error kFile for what state() did not write; the
  /// sampler is as before then.
  void restore(const std::string& state);

 private:
  struct Candidate {
    float logit;
    llama::Token token;
  };

  SamplerOptions options_;
  std::vector<llama::Token> banned_;
  std::mt19937_64 random_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

}  // namespace qfilters::cli
