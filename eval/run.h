#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "qfilters/filter_bank.h"
#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "eval/budget.h"
#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::eval {

using Json = nlohmann::ordered_json;

/// Hears how much of a task is done.
using Progress = std::function<void(std::size_t done, std::size_t total)>;

/// How one candidate runs: everything but the model, the filters and the task.
struct RunSpec {
  std::string policy = "auto";
  Budget budget;
  std::size_t sinks = 4;
  std::optional<std::size_t> recent;    ///< see limits_of() for the default
  std::optional<std::size_t> interval;  ///< see limits_of() for the default
  /// uniform, per-layer or shared (BudgetRule); by default the policy's own.
  std::optional<std::string> rule;
  double floor = 0.2;                ///< see PolicyOptions
  std::optional<std::size_t> block;  ///< by default the policy's own
  std::optional<std::string> merge;  ///< none or cam; likewise
  std::size_t chunk = 256;
  int threads = 1;
  std::uint64_t seed = 0;                ///< of `random` and of merging
  std::string protocol = "streaming";    ///< or one-shot: see is_one_shot()
  std::string cache_type = "f16";        ///< or int8; not policy `llama`
  bool llama_flash_attention = false;    ///< policy `llama` only
  std::string llama_cache_type = "f16";  ///< policy `llama` only
};

/// What a bounded policy may keep, in rows per KV head.
struct Limits {
  std::size_t budget = 0;
  std::size_t sinks = 0;
  std::size_t recent = 0;
  std::size_t interval = 0;

  friend bool operator==(const Limits&, const Limits&) = default;
};

/// `llama` and the library's own policies, in the order they are documented.
[[nodiscard]] std::vector<std::string> policy_names();
/// Neither `llama` nor `full`.
[[nodiscard]] bool is_bounded(std::string_view policy);
[[nodiscard]] bool needs_filters(std::string_view policy);

/// Whether the context is read with the full cache, compressed once down to
/// the very budget, and nothing goes afterwards. Else (streaming) rows go while
/// the text comes in.
[[nodiscard]] bool is_one_shot(const RunSpec& spec) noexcept;

/// Checks what can be checked without a model: policy name, chunk, threads,
/// rule, merger, cache type and protocol. Throws Error kInvalidArgument.
void check_spec(const RunSpec& spec);

/// The limits of a run over `tokens` tokens; none when the policy keeps every
/// row. The interval defaults to a sixteenth of the budget in whole blocks, at
/// least one: eviction then costs about the same per step whatever the budget,
/// and the rows on top stay few; one-shot has none. Recent rows default to what
/// the policy's source has (policies/registry.h), half of the budget for most,
/// as far as the sinks leave room. Throws Error kInvalidArgument unless budget
/// > sinks + recent.
[[nodiscard]] std::optional<Limits> limits_of(
    const RunSpec& spec,
    std::size_t tokens,
    std::span<const LayerShape> layers);

/// Loads the filters that `policy` needs, the first of its kind among `paths`,
/// and checks them against the model; null when it needs none. Throws Error
/// kInvalidArgument without a file of that kind and kFile for a path without a
/// file (both name `qfilters calibrate`), kMismatch for filters of another
/// model.
[[nodiscard]] std::shared_ptr<const FilterBank> load_run_filters(
    std::string_view policy,
    std::span<const std::string> paths,
    const llama::Model& model);

/// How the rows of a run are stored.
[[nodiscard]] RowFormat format_of(const RunSpec& spec);

/// The policy of a run over `tokens` tokens, but for `llama`, whose rows are
/// not ours. Throws Error as limits_of() and policies::make() do.
[[nodiscard]] Policy make_policy(
    const RunSpec& spec,
    std::shared_ptr<const FilterBank> filters,
    std::span<const LayerShape> layers,
    std::size_t tokens);

/// One that is compared with others: how it runs, and its filters if any.
struct Contender {
  RunSpec spec;
  std::shared_ptr<const FilterBank> filters;
};

/// A session for a sequence of up to `tokens` tokens.
[[nodiscard]] std::unique_ptr<llama::Session> open_session(
    const RunSpec& spec,
    std::shared_ptr<const llama::Model> model,
    std::shared_ptr<const FilterBank> filters,
    std::size_t tokens);

/// A fresh session for a sequence of so many tokens.
using SessionFactory =
    std::function<std::unique_ptr<llama::Session>(std::size_t tokens)>;

/// What one run used and how long it took.
struct RunRecord {
  RunSpec spec;
  std::optional<Limits> limits;
  std::string model_name;
  std::vector<LayerShape> layers;
  llama::SessionStats stats;
  /// One-shot: most bytes of rows after compression; the peak is the prefill's.
  std::optional<std::size_t> kv_bytes_compressed;
  std::size_t prefill_tokens = 0;
  std::size_t decode_tokens = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
};

/// A record with the facts that are known before the task.
[[nodiscard]] RunRecord start_record(
    const RunSpec& spec,
    std::optional<Limits> limits,
    const llama::Model& model);

/// Adds the statistics of one sequence to a record over several: counts and
/// seconds add up, sizes take their extremes, rows by head are the last ones.
/// `first` replaces instead.
void add_stats(
    llama::SessionStats& total, const llama::SessionStats& one, bool first);

/// The JSON object that every run has. Budget (in rows, and as it was asked
/// for), sink, recent and interval are null when the policy keeps every row,
/// rows by head when it is llama.cpp's own. Reads the peak memory of this
/// process.
[[nodiscard]] Json to_json(const RunRecord& record);

/// Largest resident size of this process so far, in bytes.
[[nodiscard]] std::uint64_t peak_rss_bytes();

}  // namespace qfilters::eval
