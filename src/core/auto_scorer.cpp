#include "qfilters/auto_scorer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/key_difference.h"

#include "core/filter_checks.h"

namespace qfilters {

namespace {

class AutoScorer final : public Scorer {
 public:
  explicit AutoScorer(std::shared_ptr<const FilterBank> filters)
      : filters_(std::move(filters)) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "auto";
  }

  [[nodiscard]] std::string identity() const override {
    return "auto " + filters_->fingerprint();
  }

  void check_layer(std::size_t layer, std::size_t kv_heads, std::size_t key_dim)
      const override {
    check_bank("auto", *filters_, layer, kv_heads, auto_size(key_dim));
  }

  // What stays with a row: facts, before other rows are looked at.
  void score(const ScoreInput& in, std::span<float> out) const override {
    const auto both = filters_->layer(in.layer).head(in.kv_head);
    score_quadratic(
        in.keys, in.batch, in.kv_head, both.first(both.size() / 2), out);
  }

  [[nodiscard]] bool frozen() const noexcept override { return false; }

  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    add_differences(in, scores);
    raise_neighbours(in, scores);
    thread_local std::vector<float> fluency;
    fluency.resize(scores.size());
    const auto both = filters_->layer(in.layer).head(in.kv_head);
    score_quadratic(
        in.rows, in.group(), both.subspan(both.size() / 2), fluency);
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] = either(scores[r], fluency[r]);
  }

 private:
  // What a standard deviation of difference from the head's other keys counts
  // for each unit that facts lack to spread this much.
  static constexpr double kDifference = 1.75;
  static constexpr double kSpread = 1.2;
  // Of a cosine in float32.
  static constexpr double kRounding = 1e-6;
  // What a fact counts less for the rows before and behind it.
  static constexpr float kNeighbour = 1;
  // Twice what a row that counts as much for both counts more.
  static constexpr double kBoth = 7;

  struct Spread {
    double mean = 0;
    double deviation = 0;
  };

  // Of the values that are finite.
  static Spread spread_of(std::span<const float> values) {
    const auto finite = [](float x) { return std::isfinite(x); };
    const auto count =
        static_cast<double>(std::ranges::count_if(values, finite));
    double mean = 0;
    for (const float value : values)
      mean += finite(value) ? static_cast<double>(value) / count : 0;
    double variance = 0;
    for (const float value : values) {
      if (!finite(value)) continue;
      const double off = static_cast<double>(value) - mean;
      variance += off * off / count;
    }
    return {mean, std::sqrt(variance)};
  }

  // The smooth maximum with roots alone, which are exact on every machine.
  static float either(float facts, float fluency) {
    const auto more = static_cast<double>(std::max(facts, fluency));
    const auto less = static_cast<double>(std::min(facts, fluency));
    const double apart = more == less ? 0 : more - less;
    // (apart + root) * (root - apart) is kBoth^2: no difference that cancels.
    const double root = std::sqrt(apart * apart + kBoth * kBoth);
    return static_cast<float>(more + kBoth * kBoth / 2 / (root + apart));
  }

  // NaN, which goes first, for a key that is not finite.
  static void add_differences(const RescoreInput& in, std::span<float> scores) {
    thread_local std::vector<float> differences;
    differences.resize(scores.size());
    key_differences(in.rows, in.group(), differences);
    const Spread facts = spread_of(scores);
    const Spread unlike = spread_of(differences);
    const double lacking =
        std::max(kSpread * kSpread - facts.deviation * facts.deviation, 0.0);
    // Keys that are all the same do not differ.
    const double weight =
        unlike.deviation > kRounding
            ? kDifference * std::sqrt(lacking) / unlike.deviation
            : 0;
    for (std::size_t r = 0; r < scores.size(); ++r) {
      const double off = static_cast<double>(differences[r]) - unlike.mean;
      scores[r] += static_cast<float>(weight * off);
    }
  }

  static void raise_neighbours(
      const RescoreInput& in, std::span<float> scores) {
    const auto position = [&](std::uint32_t row) {
      return in.rows.position(in.group(), row);
    };
    thread_local std::vector<std::uint32_t> order;
    order.resize(scores.size());
    std::iota(order.begin(), order.end(), 0U);
    in.rows.sort_by_position(in.group(), order);
    float before = 0;  // what the row before had of its own
    for (std::size_t i = 0; i < order.size(); ++i) {
      float& score = scores[order[i]];
      const float own = score;
      if (i > 0 && position(order[i - 1]) + 1 == position(order[i]))
        score = std::max(score, before - kNeighbour);
      if (i + 1 < order.size() &&
          position(order[i]) + 1 == position(order[i + 1])) {
        score = std::max(score, scores[order[i + 1]] - kNeighbour);
      }
      before = own;
    }
  }

  std::shared_ptr<const FilterBank> filters_;
};

}  // namespace

std::shared_ptr<const Scorer> make_auto_scorer(
    std::shared_ptr<const FilterBank> filters) {
  check_given("auto", filters.get());
  return std::make_shared<AutoScorer>(std::move(filters));
}

}  // namespace qfilters
