#pragma once

#include <algorithm>
#include <span>
#include <string_view>

#include "qfilters/scoring.h"

namespace qfilters::policies {

/// A scorer that knows attention alone: rows enter with nothing.
class AttentionScorer : public Scorer {
 public:
  AttentionScorer(std::string_view name, AttentionNeeds needs) noexcept
      : name_(name), needs_(needs) {}

  [[nodiscard]] std::string_view name() const noexcept final { return name_; }

  [[nodiscard]] std::optional<AttentionNeeds> attention() const noexcept final {
    return needs_;
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const final {
    std::fill(out.begin(), out.end(), 0.0F);
  }

 private:
  std::string_view name_;
  AttentionNeeds needs_;
};

}  // namespace qfilters::policies
