#include "qfilters/selection.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "qfilters/error.h"

#include "core/order_key.h"

namespace qfilters {

namespace {

using Key = std::uint64_t;

// The rows of one head that protection leaves to choose from.
struct Candidates {
  std::size_t rows;
  std::size_t begin;  // sinks
  std::size_t end;    // rows - recent

  Candidates(std::size_t count, const Protection& protection)
      : rows(count),
        begin(std::min(protection.sinks, count)),
        end(count - std::min(protection.recent, count - begin)) {}

  [[nodiscard]] std::size_t size() const { return end - begin; }

  [[nodiscard]] std::size_t protected_rows() const { return rows - size(); }
};

void fill_keys(
    std::span<const float> scores, const Candidates& candidates, Key* keys) {
  for (std::size_t i = candidates.begin; i < candidates.end; ++i) {
    keys[i - candidates.begin] =
        order_key(scores[i], static_cast<std::uint32_t>(i));
  }
}

// The largest of the keys that are not among the `count` best; puts those
// first. count < size.
Key threshold(Key* keys, std::size_t size, std::size_t count) {
  std::nth_element(keys, keys + count, keys + size, std::greater<>());
  return keys[count];
}

// Appends the keys of one head to `keys`, and to `pool` those of them that are
// not among the `least` rows that stay in any case; these become kStays.
constexpr Key kStays = ~Key{0};

void add_head(
    std::span<const float> scores,
    std::size_t least,
    const Protection& protection,
    std::vector<Key>& keys,
    std::vector<Key>& pool) {
  const Candidates candidates(scores.size(), protection);
  const std::size_t size = candidates.size();
  const std::size_t stay = std::min(least, scores.size());
  const std::size_t own = stay - std::min(stay, candidates.protected_rows());
  const std::size_t first = keys.size();
  const std::size_t at = pool.size();
  keys.resize(first + size);
  fill_keys(scores, candidates, keys.data() + first);
  const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(first);
  if (own == size) return std::fill(begin, keys.end(), kStays);
  pool.insert(pool.end(), begin, keys.end());
  if (own == 0) return;
  const Key best_to_compete = threshold(pool.data() + at, size, own);
  const auto from = pool.begin() + static_cast<std::ptrdiff_t>(at);
  pool.erase(from, from + static_cast<std::ptrdiff_t>(own));
  std::replace_if(
      begin,
      keys.end(),
      [&](Key key) { return key > best_to_compete; },
      kStays);
}

// Protected rows and those candidates that `stays` says.
template <typename Stays>
void collect(
    const Candidates& candidates,
    std::vector<std::uint32_t>& kept,
    const Stays& stays) {
  kept.clear();
  for (std::size_t i = 0; i < candidates.begin; ++i)
    kept.push_back(static_cast<std::uint32_t>(i));
  for (std::size_t i = candidates.begin; i < candidates.end; ++i) {
    if (stays(i - candidates.begin))
      kept.push_back(static_cast<std::uint32_t>(i));
  }
  for (std::size_t i = candidates.end; i < candidates.rows; ++i)
    kept.push_back(static_cast<std::uint32_t>(i));
}

}  // namespace

std::vector<std::uint32_t> select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection) {
  std::vector<std::uint32_t> kept;
  select_rows(scores, keep, protection, kept);
  return kept;
}

void select_rows(
    std::span<const float> scores,
    std::size_t keep,
    const Protection& protection,
    std::vector<std::uint32_t>& kept) {
  const Candidates candidates(scores.size(), protection);
  const std::size_t fixed = candidates.protected_rows();
  if (keep > scores.size() || keep < fixed) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "select: keep=" + std::to_string(keep) +
            " must be between sinks+recent=" + std::to_string(fixed) +
            " and rows=" + std::to_string(scores.size()));
  }
  kept.reserve(keep);
  if (keep == scores.size()) {
    kept.resize(keep);
    std::iota(kept.begin(), kept.end(), 0U);
    return;
  }
  // Keys in the order of rows, then the same again to be put in order.
  thread_local std::vector<Key> memory;
  const std::size_t size = candidates.size();
  memory.resize(2 * size);
  Key* const keys = memory.data();
  fill_keys(scores, candidates, keys);
  std::copy_n(keys, size, keys + size);
  const Key best_to_go = threshold(keys + size, size, keep - fixed);
  collect(
      candidates, kept, [&](std::size_t i) { return keys[i] > best_to_go; });
}

void select_shared(
    std::span<const SharingHead> heads,
    std::size_t keep,
    std::size_t least,
    const Protection& protection) {
  std::size_t rows = 0;
  std::size_t must = 0;
  for (const SharingHead& head : heads) {
    const std::size_t count = head.scores.size();
    const Candidates candidates(count, protection);
    rows += count;
    must += std::max(candidates.protected_rows(), std::min(least, count));
  }
  if (keep > rows || keep < must) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "select: keep=" + std::to_string(keep) + " of " +
            std::to_string(heads.size()) + " heads must be between " +
            std::to_string(must) + " (sinks, recent, least=" +
            std::to_string(least) + ") and rows=" + std::to_string(rows));
  }
  // All keys in the order of rows, and those that the heads compete with.
  thread_local std::vector<Key> keys;
  thread_local std::vector<Key> pool;
  keys.clear();
  pool.clear();
  for (const SharingHead& head : heads)
    add_head(head.scores, least, protection, keys, pool);
  std::size_t ties = keep - must;  // of keys equal to best_to_go
  Key best_to_go = 0;
  if (ties < pool.size()) {
    best_to_go = threshold(pool.data(), pool.size(), ties);
    const auto better = [&](Key key) { return key > best_to_go; };
    const auto last = pool.begin() + static_cast<std::ptrdiff_t>(ties);
    ties -= static_cast<std::size_t>(std::count_if(pool.begin(), last, better));
  }
  const Key* next = keys.data();
  for (const SharingHead& head : heads) {
    const Candidates candidates(head.scores.size(), protection);
    collect(candidates, *head.kept, [&](std::size_t i) {
      if (next[i] != best_to_go) return next[i] > best_to_go;
      return ties > 0 && ties-- > 0;
    });
    next += candidates.size();
  }
}

}  // namespace qfilters
