#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "qfilters/error.h"

#include "policies/registry.h"

namespace qfilters::policies {

namespace {

// Sums of sorted numbers, for the squared distances of any run from its mean.
class Runs {
 public:
  explicit Runs(std::span<const double> sorted)
      : sums_(sorted.size() + 1), squares_(sorted.size() + 1) {
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      // Counted from the first, so that little cancels.
      const double value = sorted[i] - sorted.front();
      sums_[i + 1] = sums_[i] + value;
      squares_[i + 1] = squares_[i] + value * value;
    }
  }

  [[nodiscard]] double spread(std::size_t begin, std::size_t end) const {
    if (begin == end) return 0;
    const double sum = sums_[end] - sums_[begin];
    return squares_[end] - squares_[begin] -
           sum * sum / static_cast<double>(end - begin);
  }

 private:
  std::vector<double> sums_;
  std::vector<double> squares_;
};

// Where the last of the three groups begins whose squared distances from their
// means are least: k-means of one dimension, whose groups are runs. Equal
// numbers stay together; without two different ones there is no last group.
std::size_t last_group(std::span<const double> sorted) {
  const Runs runs(sorted);
  const auto may_begin = [&](std::size_t i) {
    return i == 0 || sorted[i - 1] < sorted[i];
  };
  double least = std::numeric_limits<double>::infinity();
  std::size_t best = sorted.size();
  for (std::size_t last = 1; last < sorted.size(); ++last) {
    if (!may_begin(last)) continue;
    for (std::size_t middle = 0; middle < last; ++middle) {
      if (!may_begin(middle)) continue;
      const double spread = runs.spread(0, middle) + runs.spread(middle, last) +
                            runs.spread(last, sorted.size());
      if (spread >= least) continue;
      least = spread;
      best = last;
    }
  }
  return best;
}

void check(
    std::span<const LayerShape> layers,
    std::span<const float> similarities,
    std::size_t budget,
    const Protection& protection,
    double share) {
  const auto [sinks, recent] = protection;
  const bool room = sinks < budget && recent < budget - sinks;
  const bool finite = std::ranges::all_of(
      similarities, [](float s) { return std::isfinite(s); });
  if (room && finite && similarities.size() == layers.size() && share >= 0 &&
      share <= 1) {
    return;
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      "squeeze budgets: sinks (" + std::to_string(sinks) + ") + recent (" +
          std::to_string(recent) + ") must be below the budget (" +
          std::to_string(budget) + "), a share (" + std::to_string(share) +
          ") in 0..1 and a finite similarity for each of " +
          std::to_string(layers.size()) + " layers is needed (" +
          std::to_string(similarities.size()) + ")");
}

}  // namespace

std::vector<std::size_t> squeeze_budgets(
    std::span<const LayerShape> layers,
    std::span<const float> similarities,
    std::size_t budget,
    const Protection& protection,
    double share) {
  check(layers, similarities, budget, protection, share);
  std::vector<double> sorted;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].window == 0)
      sorted.push_back(static_cast<double>(similarities[l]));
  }
  std::ranges::sort(sorted);
  std::vector<std::size_t> budgets(layers.size(), budget);
  const std::size_t important = last_group(sorted);
  if (important == sorted.size()) return budgets;
  const auto rows = static_cast<double>(budget);
  const std::size_t less = std::max(
      static_cast<std::size_t>(std::llround(share * rows)),
      protection.sinks + protection.recent + 1);
  const std::size_t freed = (sorted.size() - important) * (budget - less);
  std::size_t place = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].window != 0) continue;
    if (static_cast<double>(similarities[l]) >= sorted[important]) {
      budgets[l] = less;
    } else {
      // What does not come out even goes to the first ones.
      budgets[l] += freed / important + (place++ < freed % important ? 1 : 0);
    }
  }
  return budgets;
}

}  // namespace qfilters::policies
