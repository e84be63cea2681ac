#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "qfilters/sequence_cache.h"

namespace qfilters::eval {

/// A cache budget as it was asked for.
struct Budget {
  enum class Kind {
    kRows,   ///< `512`: rows per KV head
    kShare,  ///< `25%`: of the tokens to be seen
    kBytes,  ///< `64MiB` (KiB, MiB, GiB): all of the KV cache at its peak
  };
  Kind kind = Kind::kRows;
  std::uint64_t amount = 1024;  ///< rows or bytes
  double percent = 0;           ///< kShare only
  std::string text = "1024";    ///< as given
};

/// Throws Error kInvalidArgument for anything but the three forms above, for
/// zero and for more than 100%.
[[nodiscard]] Budget parse_budget(std::string_view text);

/// The one place where a budget becomes rows per KV head.
///
/// A share is rounded up: ceil(share * tokens). Memory becomes the largest
/// number of rows whose whole blocks (kBlockRows rows of `format`), over every
/// head of every global layer and with the `on_top` rows a head may hold beyond
/// them (the interval; for heads that share a budget also what their last
/// blocks leave empty), fit into it beside the `reserved` bytes that are taken
/// anyway (the cells of one micro-batch). What windowed layers store lives
/// outside the budget. Throws Error kInvalidArgument when no row is left.
[[nodiscard]] std::size_t budget_rows(
    const Budget& budget,
    std::size_t tokens,
    std::span<const LayerShape> layers,
    std::size_t on_top,
    std::uint64_t reserved,
    RowFormat format = RowFormat::kSame);

}  // namespace qfilters::eval
