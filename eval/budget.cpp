#include "eval/budget.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <system_error>

#include "qfilters/error.h"
#include "qfilters/kv_store.h"
#include "qfilters/row_pool.h"

namespace qfilters::eval {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "budget: " + message);
}

/// The bytes of one unit, 0 for an unknown one.
std::uint64_t unit_bytes(std::string_view unit) {
  if (unit == "KiB") return std::uint64_t{1} << 10;
  if (unit == "MiB") return std::uint64_t{1} << 20;
  if (unit == "GiB") return std::uint64_t{1} << 30;
  return 0;
}

/// Bytes of one block for every head of every global layer.
std::uint64_t block_bytes(
    std::span<const LayerShape> layers, RowFormat format) {
  std::uint64_t bytes = 0;
  for (const LayerShape& layer : layers) {
    if (layer.window != 0) continue;
    RowShape shape;
    shape.kv_heads = layer.kv_heads;
    shape.key_dim = layer.key_dim;
    shape.value_dim = layer.value_dim;
    shape.format = format;
    bytes += shape.block_bytes() * shape.groups();
  }
  return bytes;
}

}  // namespace

Budget parse_budget(std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] =
      std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  const std::string shown = "'" + std::string(text) + "'";
  if (error != std::errc{} || !(number > 0)) {
    refuse(shown + " is not rows (512), a share (25%) or memory (64MiB)");
  }

  Budget budget;
  budget.text = text;
  if (unit == "%") {
    if (number > 100) refuse(shown + " is more than 100%");
    budget.kind = Budget::Kind::kShare;
    budget.amount = 0;
    budget.percent = number;
    return budget;
  }
  const std::uint64_t bytes = unit_bytes(unit);
  if (!unit.empty() && bytes == 0) {
    refuse(shown + " has an unknown unit; known: %, KiB, MiB, GiB");
  }
  if (unit.empty() && number != std::floor(number)) {
    refuse(shown + " is not a whole number of rows");
  }
  const double amount = number * static_cast<double>(unit.empty() ? 1 : bytes);
  if (amount < 1) refuse(shown + " is less than one byte");
  // Positions are int32, memory has 64 bits.
  if (amount >
      (unit.empty() ? std::numeric_limits<std::int32_t>::max() : 9.0e18)) {
    refuse(shown + " is too large");
  }
  budget.kind = unit.empty() ? Budget::Kind::kRows : Budget::Kind::kBytes;
  budget.amount = static_cast<std::uint64_t>(amount);
  return budget;
}

std::size_t budget_rows(
    const Budget& budget,
    std::size_t tokens,
    std::span<const LayerShape> layers,
    std::size_t on_top,
    std::uint64_t reserved,
    RowFormat format) {
  if (budget.kind == Budget::Kind::kRows) return budget.amount;
  if (budget.kind == Budget::Kind::kShare) {
    // Percent times tokens first: exact for whole percents.
    const double rows =
        std::ceil(budget.percent * static_cast<double>(tokens) / 100.0);
    if (rows < 1) refuse(budget.text + " of no tokens leaves no row");
    return static_cast<std::size_t>(rows);
  }
  const std::uint64_t all_heads = block_bytes(layers, format);
  if (all_heads == 0) {
    refuse("the model has no layer that a budget could bound");
  }
  const std::uint64_t left = budget.amount - std::min(budget.amount, reserved);
  const std::uint64_t rows = left / all_heads * kBlockRows;
  if (rows <= on_top) {
    const std::uint64_t blocks = on_top / kBlockRows + 1;
    refuse(
        budget.text + " leaves no row: one row a head, " +
        std::to_string(on_top) +
        " rows (interval) on top and the cells of one step take " +
        std::to_string((blocks * all_heads + reserved + 1023) / 1024) +
        "KiB here");
  }
  return static_cast<std::size_t>(rows - on_top);
}

}  // namespace qfilters::eval
