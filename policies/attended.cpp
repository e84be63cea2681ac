#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

// All attention a row ever got travels with it, as with H2O.
class AttendedScorer final : public Scorer {
 public:
  explicit AttendedScorer(std::shared_ptr<const Scorer> base)
      : base_(std::move(base)), attended_(make_h2o_scorer()) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return base_->name();
  }

  [[nodiscard]] std::string identity() const override {
    return base_->identity();  // the merger's tells the rest
  }

  void check_layer(std::size_t layer, std::size_t kv_heads, std::size_t key_dim)
      const override {
    base_->check_layer(layer, kv_heads, key_dim);
  }

  [[nodiscard]] std::optional<AttentionNeeds> attention()
      const noexcept override {
    return attended_->attention();
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    attended_->score(in, out);
  }

  void observe(const ObserveInput& in, std::span<float> scores) const override {
    attended_->observe(in, scores);
  }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    score_rows(*base_, in, scores);
    if (!base_->frozen()) base_->rescore(in, scores);
  }

 private:
  std::shared_ptr<const Scorer> base_;
  std::shared_ptr<const Scorer> attended_;
};

}  // namespace

std::shared_ptr<const Scorer> make_attended_scorer(
    std::shared_ptr<const Scorer> base) {
  return std::make_shared<AttendedScorer>(std::move(base));
}

}  // namespace qfilters::policies
