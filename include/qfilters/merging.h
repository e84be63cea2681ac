#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace qfilters {

/// A head of which rows go: all it held, stored and new, oldest first.
struct MergeInput {
  std::size_t layer = 0;
  std::size_t batch = 0;
  std::size_t kv_head = 0;
  std::span<const std::int32_t> positions;  ///< ascending
  /// What travels with the rows: what the scorer made of attention. Rows may
  /// have been chosen by others (Scorer::rescore()).
  std::span<const float> scores;
  std::span<const std::uint32_t> kept;  ///< rows that stay, ascending
};

/// The value of one row that goes, added to some that stay.
struct Merge {
  std::uint32_t evicted = 0;  ///< the row that goes
  std::uint32_t first = 0;    ///< kept[first] to kept[first + count - 1]
  std::uint32_t count = 0;    ///< each get
  float weight = 0;           ///< times its value

  friend bool operator==(const Merge&, const Merge&) = default;
};

/// Says which values of evicted rows go on in rows that stay; keys, positions
/// and scores of these do not change. Immutable and thread safe.
class Merger {
 public:
  Merger() = default;
  Merger(const Merger&) = delete;
  Merger& operator=(const Merger&) = delete;
  virtual ~Merger() = default;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Tells mergers of one name apart that merge differently: what a snapshot is
  /// checked against.
  [[nodiscard]] virtual std::string identity() const = 0;

  /// Whether the scores must come from attention.
  [[nodiscard]] virtual bool attention() const noexcept { return false; }

  /// Appends to `out` what is merged. Rows that do not go and ranges beyond
  /// in.kept make the commit throw Error kInvalidArgument, as what this throws
  /// comes out of it; nothing has changed then.
  virtual void merge(const MergeInput& in, std::vector<Merge>& out) const = 0;
};

struct CamOptions {
  std::size_t targets = 32;  ///< rows that share an evicted value
  std::uint64_t seed = 0;
};

/// CaM (Cache Merging, Zhang et al., ICML 2024, PMLR 235:58840): a row that
/// goes gives 1 / targets of its value to each of the `targets` rows that stay
/// behind it (as far as there are so many), with the probability of its
/// attention over the mean of theirs, at most 1. Chance is a hash of (seed,
/// layer, batch, head, position), so that chunking and threads do not change
/// it. O(rows * targets). Throws Error kInvalidArgument for no targets or more
/// than kMostSize.
[[nodiscard]] std::shared_ptr<const Merger> make_cam_merger(
    const CamOptions& options = {});

}  // namespace qfilters
