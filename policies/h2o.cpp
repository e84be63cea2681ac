#include <memory>
#include <span>

#include "policies/attention_scorer.h"
#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class H2oScorer final : public AttentionScorer {
 public:
  H2oScorer() : AttentionScorer("h2o", {AttentionStatistics::Kind::kSum, 0}) {}

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] += attention[r];
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_h2o_scorer() {
  return std::make_shared<H2oScorer>();
}

}  // namespace qfilters::policies
