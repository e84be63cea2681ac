#include <algorithm>
#include <memory>
#include <span>

#include "policies/attention_scorer.h"
#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class ReconstructScorer final : public AttentionScorer {
 public:
  ReconstructScorer()
      : AttentionScorer("reconstruct", {AttentionStatistics::Kind::kMax, 0}) {}

  [[nodiscard]] bool rehearses() const noexcept override { return true; }

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] = std::max(scores[r], attention[r]);
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_reconstruct_scorer() {
  return std::make_shared<ReconstructScorer>();
}

}  // namespace qfilters::policies
