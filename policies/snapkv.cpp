#include <algorithm>
#include <cstddef>
#include <cstdint>
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
    thread_local std::vector<std::uint32_t> before;
    find_rows_before_window(in, before);
    thread_local std::vector<float> raw;
    raw.clear();
    for (const std::uint32_t row : before)
      raw.push_back(scores[row]);
    const std::size_t reach = options_.kernel / 2;
    for (std::size_t r = 0; r < raw.size(); ++r) {
      const std::size_t first = r - std::min(r, reach);
      const std::size_t end = std::min(r + reach + 1, raw.size());
      scores[before[r]] = pooled(std::span(raw).subspan(first, end - first));
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

  // By position.
  void find_rows_before_window(
      const RescoreInput& in, std::vector<std::uint32_t>& out) const {
    const std::size_t group = in.group();
    const auto position = [&](std::uint32_t row) {
      return static_cast<std::size_t>(in.rows.position(group, row));
    };
    const std::size_t end =
        static_cast<std::size_t>(in.rows.first_position()) + in.rows.new_rows();
    out.clear();
    for (std::uint32_t row = 0; row < in.rows.rows(group); ++row) {
      if (position(row) + options_.window < end) out.push_back(row);
    }
    in.rows.sort_by_position(group, out);
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
