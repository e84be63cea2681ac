#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qfilters/error.h"

#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class KeySvdScorer final : public Scorer {
 public:
  explicit KeySvdScorer(int sign) : sign_(static_cast<float>(sign)) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "qfilters-keysvd";
  }

  [[nodiscard]] std::string identity() const override {
    return std::string(name()) + (sign_ < 0 ? " -" : " +");
  }

  void score(const ScoreInput& /*in*/, std::span<float> out) const override {
    std::fill(out.begin(), out.end(), 0.0F);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    const std::size_t dim = in.rows.shape().key_dim;
    const std::size_t group = in.group();
    thread_local std::vector<float> keys;
    keys.resize(scores.size() * dim);
    read_keys(in.rows, group, keys);
    const auto direction = key_direction(keys, scores.size(), dim);
    for (std::size_t r = 0; r < scores.size(); ++r) {
      float sum = 0;
      for (std::size_t d = 0; d < dim; ++d)
        sum += keys[r * dim + d] * direction[d];
      scores[r] = sign_ * sum;
    }
  }

 private:
  float sign_;
};

}  // namespace

std::shared_ptr<const Scorer> make_keysvd_scorer(int sign) {
  if (sign != 1 && sign != -1) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "qfilters-keysvd: sign must be +1 or -1, got " + std::to_string(sign));
  }
  return std::make_shared<KeySvdScorer>(sign);
}

}  // namespace qfilters::policies
