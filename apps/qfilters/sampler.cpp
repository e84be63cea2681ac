#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>
#include <utility>

#include "qfilters/error.h"

namespace qfilters::cli {

Sampler::Sampler(
    const SamplerOptions& options, std::vector<llama::Token> banned)
    : options_(options), banned_(std::move(banned)), random_(options.seed) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw Error(ErrorKind::kInvalidArgument, "temp: must be 0 or more");
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw Error(ErrorKind::kInvalidArgument, "top-p: must be in (0, 1]");
  }
}

std::string Sampler::state() const {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << random_;
  return text.str();
}

void Sampler::restore(const std::string& state) {
  std::istringstream text(state);
  text.imbue(std::locale::classic());
  std::mt19937_64 random;
  text >> random;
  Sampler next = *this;
  next.random_ = random;
  if (!text || next.state() != state) {
    throw Error(ErrorKind::kFile, "sampler: the saved state makes no sense");
  }
  random_ = random;
}

llama::Token Sampler::pick(std::span<const float> logits) {
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw Error(ErrorKind::kRuntime, "sampling: the logits are not finite");
    }
    candidates_.push_back({logits[i], static_cast<llama::Token>(i)});
  }
  for (const llama::Token token : banned_) {
    candidates_[static_cast<std::size_t>(token)].logit =
        -std::numeric_limits<float>::infinity();
  }
  // A total order, so that equal logits are picked the same way everywhere.
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  const bool greedy = options_.temperature == 0;
  std::size_t count = candidates_.size();
  if (greedy) {
    count = 1;
  } else if (options_.top_k != 0) {
    count = std::min(count, options_.top_k);
  }
  std::partial_sort(
      candidates_.begin(),
      candidates_.begin() + static_cast<std::ptrdiff_t>(count),
      candidates_.end(),
      better);
  if (greedy) return candidates_.front().token;

  weights_.clear();
  double sum = 0;
  const double largest = static_cast<double>(candidates_.front().logit);
  for (std::size_t i = 0; i < count; ++i) {
    const double logit = static_cast<double>(candidates_[i].logit);
    weights_.push_back(std::exp((logit - largest) / options_.temperature));
    sum += weights_.back();
  }
  double kept = 0;
  std::size_t last = 0;
  for (; last < count && kept < options_.top_p * sum; ++last) {
    kept += weights_[last];
  }
  // 53 random bits: uniform in [0, 1).
  const double uniform = static_cast<double>(random_() >> 11U) * 0x1.0p-53;
  double left = uniform * kept;
  for (std::size_t i = 0; i + 1 < last; ++i) {
    left -= weights_[i];
    if (left < 0) return candidates_[i].token;
  }
  return candidates_[std::max<std::size_t>(last, 1) - 1].token;
}

}  // namespace qfilters::cli
