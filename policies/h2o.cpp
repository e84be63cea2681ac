#include <memory>
#include <span>
#include <string_view>

#include "policies/attention_scorer.h"
#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class H2oScorer final : public AttentionScorer {
 public:
  explicit H2oScorer(std::string_view name)
      : AttentionScorer(name, {AttentionStatistics::Kind::kSum, 0}) {}

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] += attention[r];
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_h2o_scorer(std::string_view name) {
  return std::make_shared<H2oScorer>(name);
}

}  // namespace qfilters::policies
