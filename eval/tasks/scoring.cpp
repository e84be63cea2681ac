#include "eval/tasks/scoring.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "qfilters/error.h"

namespace qfilters::eval {

double negative_log_likelihood(std::span<const float> logits, Token target) {
  if (target < 0 || static_cast<std::size_t>(target) >= logits.size()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "loss: token " + std::to_string(target) + " is not below " +
            std::to_string(logits.size()));
  }
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) {
    sum += static_cast<double>(std::exp(logit - largest));
  }
  const float own = logits[static_cast<std::size_t>(target)];
  const double loss =
      std::log(sum) + static_cast<double>(largest) - static_cast<double>(own);
  if (std::isnan(loss)) {
    throw Error(ErrorKind::kRuntime, "loss: the logits are not finite");
  }
  return loss;
}

Token greedy_choice(std::span<const float> logits) {
  return static_cast<Token>(
      std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double share_found(
    std::string_view prediction, std::span<const std::string> references) {
  const auto lower = [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const auto same = [&](char a, char b) { return lower(a) == lower(b); };
  if (references.empty()) return 1;
  const auto found = std::count_if(
      references.begin(), references.end(), [&](const std::string& wanted) {
        return wanted.empty() || std::search(
                                     prediction.begin(),
                                     prediction.end(),
                                     wanted.begin(),
                                     wanted.end(),
                                     same) != prediction.end();
      });
  return static_cast<double>(found) / static_cast<double>(references.size());
}

}  // namespace qfilters::eval
