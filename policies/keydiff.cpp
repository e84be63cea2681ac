#include <cmath>
#include <vector>

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
    const std::size_t dim = in.rows.shape().key_dim;
    std::vector<float> keys(scores.size() * dim);
    const std::size_t group = in.batch * in.rows.shape().kv_heads + in.kv_head;
    read_keys(in.rows, group, keys);
    std::vector<float> anchor(dim);
    for (std::size_t r = 0; r < scores.size(); ++r) {
      float* const key = keys.data() + r * dim;
      float sum = 0;
      for (std::size_t d = 0; d < dim; ++d)
        sum += key[d] * key[d];
      const float scale = sum > 0 ? 1 / std::sqrt(sum) : 0.0F;
      for (std::size_t d = 0; d < dim; ++d) {
        key[d] *= scale;
        anchor[d] += key[d];
      }
    }
    float norm = 0;
    for (const float a : anchor)
      norm += a * a;
    norm = norm > 0 ? 1 / std::sqrt(norm) : 0.0F;
    for (std::size_t r = 0; r < scores.size(); ++r) {
      float dot = 0;
      for (std::size_t d = 0; d < dim; ++d)
        dot += keys[r * dim + d] * anchor[d];
      scores[r] = -dot * norm;
    }
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_keydiff_scorer() {
  return std::make_shared<KeyDiffScorer>();
}

}  // namespace qfilters::policies
