// EvictionQueue decides as select_rows() does, step by step.
#include "core/eviction_queue.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "qfilters/selection.h"

#include "unit/generators.h"

namespace qfilters {
namespace {

using test::any_of;

// Few values, so that scores tie; some that are no numbers.
float any_score() {
  return *rc::gen::element(
      -1.0F,
      -0.0F,
      0.0F,
      1.0F,
      2.0F,
      std::numeric_limits<float>::infinity(),
      std::numeric_limits<float>::quiet_NaN(),
      static_cast<float>(any_of(0, 1000)));
}

RC_GTEST_PROP(EvictionQueueTest, LetsGoWhatSelectionLetsGo, ()) {
  const Protection protection{any_of(0, 3), any_of(0, 5)};
  const std::size_t budget =
      protection.sinks + protection.recent + any_of(1, 20);
  std::vector<float> scores(budget);
  std::vector<std::int32_t> positions(budget);
  for (float& score : scores)
    score = any_score();
  std::iota(positions.begin(), positions.end(), 5);
  // Slots in any order.
  for (std::size_t i = budget; i > 1; --i)
    std::swap(positions[i - 1], positions[any_of(0, i - 1)]);

  EvictionQueue queue;
  RC_ASSERT(!queue.ready());
  queue.build(positions, scores, protection);
  RC_ASSERT(queue.ready());
  const std::size_t steps = any_of(0, 60);
  for (std::size_t step = 0; step < steps; ++step) {
    const auto position = static_cast<std::int32_t>(5 + budget + step);
    const float score = any_score();
    // The same by selection over the rows in temporal order.
    std::vector<std::size_t> order(budget);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](auto a, auto b) {
      return positions[a] < positions[b];
    });
    std::vector<float> temporal;
    for (const std::size_t slot : order)
      temporal.push_back(scores[slot]);
    temporal.push_back(score);
    const auto kept = select_rows(temporal, budget, protection);
    std::size_t gone = 0;
    while (gone < kept.size() && kept[gone] == gone)
      ++gone;

    const auto slot = queue.replace(score, position);
    RC_ASSERT(slot.has_value() == (gone < budget));
    if (!slot) continue;
    RC_ASSERT(*slot == order[gone]);
    positions[*slot] = position;
    scores[*slot] = score;
  }
  queue.reset();
  RC_ASSERT(!queue.ready());
}

}  // namespace
}  // namespace qfilters
