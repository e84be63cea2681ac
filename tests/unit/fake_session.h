#pragma once

// A session and a vocabulary of bytes for tests of the evaluation: no model,
// logits that can be worked out by hand.

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eval/text.h"
#include "llama/session.h"

namespace qfilters::test {

inline constexpr std::size_t kBytes = 256;

/// Every byte is a token.
inline eval::Codec byte_codec(std::vector<eval::Token> prefix = {}) {
  eval::Codec codec;
  codec.tokenize = [](std::string_view text) {
    std::vector<eval::Token> tokens;
    for (const char c : text)
      tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  };
  codec.piece = [](eval::Token token) {
    return std::string(1, static_cast<char>(token));
  };
  codec.prefix = std::move(prefix);
  codec.vocabulary = kBytes;
  return codec;
}

/// Recalls: the last `context` tokens are looked for in what was seen before,
/// and the token that followed them then gets logit `height`, all others 0.
/// Like a bounded cache it forgets all but the last `memory` tokens.
class RecallSession final : public llama::Session {
 public:
  RecallSession(
      std::size_t chunk,
      std::size_t context,
      float height,
      std::size_t memory = static_cast<std::size_t>(-1))
      : chunk_(chunk), context_(context), memory_(memory), height_(height) {}

  struct Step {
    std::size_t tokens;
    llama::Logits logits;
    friend bool operator==(const Step&, const Step&) = default;
  };

  void run(std::span<const eval::Token> tokens, llama::Logits wanted) override {
    steps_.push_back({tokens.size(), wanted});
    rows_.assign(tokens.size(), {});
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      seen_.push_back(tokens[i]);
      const bool last = i + 1 == tokens.size();
      if (wanted == llama::Logits::kAll ||
          (wanted == llama::Logits::kLast && last)) {
        rows_[i] = predict();
      }
    }
  }

  [[nodiscard]] const float* logits(std::size_t i) const override {
    return rows_.at(i).empty() ? throw std::out_of_range("no logits")
                               : rows_[i].data();
  }

  [[nodiscard]] std::size_t chunk() const noexcept override { return chunk_; }

  [[nodiscard]] llama::SessionStats stats() const override {
    llama::SessionStats stats;
    stats.tokens = seen_.size();
    stats.rows_min = stats.rows_max = std::min(memory_, seen_.size());
    stats.rows_mean = static_cast<double>(stats.rows_min);
    stats.evictions = 1;
    return stats;
  }

  [[nodiscard]] const llama::Model& model() const noexcept override {
    std::terminate();  // the tasks must not need one
  }

  [[nodiscard]] const std::vector<Step>& steps() const { return steps_; }

 private:
  [[nodiscard]] std::vector<float> predict() const {
    std::vector<float> row(kBytes, 0.0F);
    const std::size_t n = seen_.size();
    const std::size_t begin = n > memory_ ? n - memory_ : 0;
    const auto place = [&](std::size_t i) {
      return seen_.begin() + static_cast<std::ptrdiff_t>(i);
    };
    if (n < context_) return row;
    for (std::size_t i = n; i-- > begin + context_;) {
      if (std::equal(place(i - context_), place(i), place(n - context_))) {
        row[static_cast<std::size_t>(seen_[i])] = height_;
        break;
      }
    }
    return row;
  }

  std::size_t chunk_;
  std::size_t context_;
  std::size_t memory_;
  float height_;
  std::vector<eval::Token> seen_;
  std::vector<std::vector<float>> rows_;
  std::vector<Step> steps_;
};

}  // namespace qfilters::test
