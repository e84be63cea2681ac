// parse_budget() on foreign text, and what budget_rows() makes of it.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/kv_store.h"

#include "eval/budget.h"
#include "fuzz/require.h"

namespace qfilters::fuzz {
namespace {

using eval::Budget;

template <typename Call>
auto accepted(Call&& call) -> std::optional<decltype(call())> {
  try {
    return call();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument, error.what());
    return std::nullopt;
  }
}

void check(std::string_view text, RowFormat format) {
  const auto budget = accepted([&] { return eval::parse_budget(text); });
  if (!budget) return;
  require(
      budget->kind == Budget::Kind::kShare
          ? budget->percent > 0 && budget->percent <= 100
          : budget->amount > 0,
      "a budget of nothing is accepted");
  constexpr std::size_t kTokens = 1000;
  constexpr std::size_t kInterval = 64;
  constexpr std::uint64_t kReserved = 4096;
  const std::vector<LayerShape> layers = {{2, 4, 4, 0}, {1, 8, 8, 100}};
  const auto rows = accepted([&] {
    return eval::budget_rows(
        *budget, kTokens, layers, kInterval, kReserved, format);
  });
  if (!rows) return;
  require(*rows > 0, "a budget of no rows is accepted");
  if (budget->kind == Budget::Kind::kShare) {
    require(*rows <= kTokens, "a share is more than the whole");
  }
  if (budget->kind == Budget::Kind::kBytes) {
    const RowShape shape{1, 2, 4, 4, DType::kFloat16, format};
    const std::uint64_t blocks =
        (*rows + kInterval + kBlockRows - 1) / kBlockRows;
    require(
        blocks * shape.groups() * shape.block_bytes() + kReserved <=
            budget->amount,
        "the rows take more than the budget");
  }
}

}  // namespace
}  // namespace qfilters::fuzz

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size) {
  for (const auto format :
       {qfilters::RowFormat::kSame, qfilters::RowFormat::kInt8}) {
    qfilters::fuzz::check({reinterpret_cast<const char*>(data), size}, format);
  }
  return 0;
}
