#include "qfilters/merging.h"

#include <algorithm>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/row_noise.h"

namespace qfilters {

namespace {

// How likely a value is merged into rows kept[first], kept[first + 1], ...
float probability(
    const MergeInput& in,
    std::size_t evicted,
    std::size_t first,
    std::size_t count) {
  float sum = 0;
  for (const std::uint32_t target : in.kept.subspan(first, count))
    sum += in.scores[target];
  const float mean = sum / static_cast<float>(count);
  // 0 / 0 is less than nothing: without attention there is nothing to lose.
  return in.scores[evicted] / mean;
}

class CamMerger final : public Merger {
 public:
  explicit CamMerger(const CamOptions& options) : options_(options) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "cam";
  }

  [[nodiscard]] std::string identity() const override {
    return "cam " + std::to_string(options_.targets) + " " +
           std::to_string(options_.seed);
  }

  [[nodiscard]] bool attention() const noexcept override { return true; }

  void merge(const MergeInput& in, std::vector<Merge>& out) const override {
    // Not the numbers of make_random_scorer(seed): rows that go by those have
    // small ones.
    const RowNoise chance(~options_.seed, in.layer, in.batch, in.kv_head);
    const float weight = 1.0F / static_cast<float>(options_.targets);
    std::size_t behind = 0;  // the first kept row behind the one at hand
    for (std::size_t row = 0; row < in.positions.size(); ++row) {
      if (behind == in.kept.size()) return;
      if (in.kept[behind] == row) {
        ++behind;
        continue;
      }
      const std::size_t count =
          std::min(options_.targets, in.kept.size() - behind);
      const auto position = static_cast<std::uint64_t>(in.positions[row]);
      if (!(chance(position) < probability(in, row, behind, count))) continue;
      out.push_back(
          {static_cast<std::uint32_t>(row),
           static_cast<std::uint32_t>(behind),
           static_cast<std::uint32_t>(count),
           weight});
    }
  }

 private:
  CamOptions options_;
};

}  // namespace

std::shared_ptr<const Merger> make_cam_merger(const CamOptions& options) {
  if (!is_size(options.targets)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "cam: targets=" + std::to_string(options.targets) + " is not in 1.." +
            std::to_string(kMostSize));
  }
  return std::make_shared<CamMerger>(options);
}

}  // namespace qfilters
