#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/run.h"
#include "eval/tasks/ruler.h"

namespace qfilters::eval {

/// What other projects' result files say about a run.
struct LayoutInfo {
  RunSpec spec;
  std::string model;
  std::uint64_t seed = 0;
  /// Rows per head at a length; none when every row stays.
  std::function<std::optional<Limits>(std::size_t length)> limits;
  /// The sample of a cell.
  std::function<RulerSample(const RulerCell&)> sample;
};

/// Folder of a run at one length as kvpress names it:
/// ruler__<length>__<model>__<policy>__<ratio>, the ratio being the share of
/// the length that the budget leaves out, in two digits. Rows stored other
/// than in f16 stand behind the policy: <policy>-int8.
[[nodiscard]] std::string kvpress_folder(
    const LayoutInfo& info, std::size_t length);

/// Folder of a run at one length in RULER's layout: <policy>-<budget>/<length>,
/// without a budget where every row stays.
[[nodiscard]] std::string ruler_folder(
    const LayoutInfo& info, std::size_t length);

/// Writes, for every length of the cells, a folder as kvpress does:
/// predictions.csv (all but the context), metrics.json ({task:
/// {"string_match": 0..100}}) and config.yaml. Folders are made; files of an
/// earlier run are replaced. Throws Error kFile.
void write_kvpress(
    const std::filesystem::path& directory,
    const LayoutInfo& info,
    std::span<const RulerCell> cells);

/// Writes, for every length of the cells, a folder as RULER does: <task>.jsonl
/// (index, input, outputs, pred, others, truncation, length) and summary.csv
/// (rows Tasks, Score in 0..100, Nulls: predictions without a letter). Throws
/// Error kFile.
void write_ruler(
    const std::filesystem::path& directory,
    const LayoutInfo& info,
    std::span<const RulerCell> cells);

/// Throws Error kFile unless files can be made below `directory`, which need
/// not exist yet. Leaves nothing behind.
void check_directory(const std::filesystem::path& directory);

}  // namespace qfilters::eval
