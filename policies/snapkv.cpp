#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/error.h"

#include "policies/attention_scorer.h"
#include "policies/scorers.h"

namespace qfilters::policies {

namespace {

class SnapScorer final : public AttentionScorer {
 public:
  SnapScorer(std::string_view name, const SnapOptions& options)
      : AttentionScorer(
            name, {AttentionStatistics::Kind::kSum, options.window}),
        options_(options) {}

  [[nodiscard]] std::string identity() const override {
    return std::string(name()) + " window " + std::to_string(options_.window) +
           " kernel " + std::to_string(options_.kernel) +
           (options_.pooling == Pooling::kMean ? " mean" : "");
  }

  // A micro-batch shorter than the window leaves the share of the old scores
  // that it does not fill: a moving average over about a window of queries.
  void observe(const ObserveInput& in, std::span<float> scores) const override {
    const auto seen =
        static_cast<float>(std::min(in.rows.new_rows(), options_.window));
    const float left = 1 - seen / static_cast<float>(options_.window);
    const auto& attention = in.attention[in.group()];
    for (std::size_t r = 0; r < scores.size(); ++r)
      scores[r] = scores[r] * left + attention[r];
  }

  // Rows of the window see each other, so that no row before them may borrow
  // their scores.
  void rescore(const RescoreInput& in, std::span<float> scores) const override {
    thread_local std::vector<float> raw;
    const std::size_t rows = rows_before_window(in);
    raw.assign(scores.begin(), scores.begin() + to_difference(rows));
    const std::size_t reach = options_.kernel / 2;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t first = r - std::min(r, reach);
      scores[r] = pooled(
          std::span(raw).subspan(first, std::min(r + reach + 1, rows) - first));
    }
  }

 private:
  [[nodiscard]] float pooled(std::span<const float> scores) const {
    if (options_.pooling == Pooling::kMax)
      return *std::max_element(scores.begin(), scores.end());
    float sum = 0;
    for (const float score : scores)
      sum += score;
    return sum / static_cast<float>(options_.kernel);
  }

  static std::ptrdiff_t to_difference(std::size_t n) noexcept {
    return static_cast<std::ptrdiff_t>(n);
  }

  [[nodiscard]] std::size_t rows_before_window(
      const RescoreInput& in) const noexcept {
    const std::size_t group = in.group();
    const std::size_t end =
        static_cast<std::size_t>(in.rows.first_position()) + in.rows.new_rows();
    std::size_t rows = in.rows.rows(group);
    while (rows > 0 &&
           static_cast<std::size_t>(in.rows.position(group, rows - 1)) +
                   options_.window >=
               end) {
      --rows;
    }
    return rows;
  }

  SnapOptions options_;
};

}  // namespace

std::shared_ptr<const Scorer> make_snapkv_scorer(
    std::string_view name, const SnapOptions& options) {
  if (options.window == 0 || options.kernel % 2 == 0) {
    throw Error(
        ErrorKind::kInvalidArgument,
        std::string(name) + ": window=" + std::to_string(options.window) +
            " kernel=" + std::to_string(options.kernel) +
            ": a window of 1 or more and an odd kernel are needed");
  }
  return std::make_shared<SnapScorer>(name, options);
}

}  // namespace qfilters::policies
