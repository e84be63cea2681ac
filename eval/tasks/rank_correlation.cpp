#include "eval/tasks/rank_correlation.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "qfilters/error.h"

namespace qfilters::eval {

namespace {

/// Ranks minus their mean.
std::vector<double> centred_ranks(std::span<const float> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
    return values[x] < values[y];
  });
  const double mean = (static_cast<double>(values.size()) - 1) / 2;
  std::vector<double> ranks(values.size());
  for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && values[order[end]] == values[order[begin]]) {
      ++end;
    }
    const double rank = static_cast<double>(begin + end - 1) / 2 - mean;
    for (std::size_t i = begin; i < end; ++i) {
      ranks[order[i]] = rank;
    }
  }
  return ranks;
}

}  // namespace

std::optional<double> rank_correlation(
    std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "rank correlation: " + std::to_string(a.size()) + " values and " +
            std::to_string(b.size()));
  }
  const auto is_nan = [](float x) { return std::isnan(x); };
  if (std::any_of(a.begin(), a.end(), is_nan) ||
      std::any_of(b.begin(), b.end(), is_nan)) {
    return std::nullopt;
  }
  const std::vector<double> x = centred_ranks(a);
  const std::vector<double> y = centred_ranks(b);
  const auto dot = [](const std::vector<double>& u,
                      const std::vector<double>& v) {
    return std::inner_product(u.begin(), u.end(), v.begin(), 0.0);
  };
  const double xx = dot(x, x);
  const double yy = dot(y, y);
  if (xx == 0 || yy == 0) return std::nullopt;
  return dot(x, y) / std::sqrt(xx * yy);
}

}  // namespace qfilters::eval
