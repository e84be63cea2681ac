#include <algorithm>
#include <span>

#include "qfilters/key_difference.h"

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class KeyDiffScorer final : public Scorer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override {
    return "keydiff";
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 0.0F);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    key_differences(in.rows, in.group(), scores);
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_keydiff_scorer() {
  return std::make_shared<KeyDiffScorer>();
}

}  // namespace qfilters::policies
