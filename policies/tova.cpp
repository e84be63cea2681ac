#include <algorithm>
#include <memory>
#include <span>

#include "policies/attention_scorer.h"
#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class TovaScorer final : public AttentionScorer {
 public:
  TovaScorer()
      : AttentionScorer("tova", {AttentionStatistics::Kind::kSum, 1}) {}

  // The heads of a layer hold the same rows, since all have these scores: their
  // sum ranks as their mean. A head that parted from the others (under another
  // policy, say) does not count for them.
  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const std::size_t heads = in.rows.shape().kv_heads;
    const auto own = in.rows.store().positions(in.group());
    std::fill(scores.begin(), scores.end(), 0.0F);
    for (std::size_t g = in.batch * heads; g < (in.batch + 1) * heads; ++g) {
      if (!std::ranges::equal(in.rows.store().positions(g), own)) continue;
      for (std::size_t r = 0; r < scores.size(); ++r)
        scores[r] += in.attention[g][r];
    }
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_tova_scorer() {
  return std::make_shared<TovaScorer>();
}

}  // namespace qfilters::policies
