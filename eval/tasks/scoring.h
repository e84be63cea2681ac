#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "eval/text.h"

namespace qfilters::eval {

/// -log softmax(logits)[target]: the loss of a prediction. The maximum is
/// taken out first; the sum is float64.
[[nodiscard]] double negative_log_likelihood(
    std::span<const float> logits, Token target);

/// The token a greedy decoder picks: the first of the largest logits.
[[nodiscard]] Token greedy_choice(std::span<const float> logits);

/// The share of `references` that occur in `prediction`, upper and lower case
/// of ASCII letters being the same; 1 for no references. RULER calls it
/// string_match_all. O(prediction * references).
[[nodiscard]] double share_found(
    std::string_view prediction, std::span<const std::string> references);

/// Runs a function and adds the seconds it took to `total`.
template <typename Function>
void timed(double& total, Function&& function) {
  const auto start = std::chrono::steady_clock::now();
  function();
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  total += took.count();
}

}  // namespace qfilters::eval
