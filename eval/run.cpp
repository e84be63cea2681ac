#include "eval/run.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "qfilters/error.h"
#include "qfilters/filter_file.h"
#include "qfilters/isa.h"
#include "qfilters/limits.h"
#include "qfilters/policy.h"

#include "llama/engine.h"
#include "llama/filter_kind.h"
#include "policies/registry.h"

namespace qfilters::eval {

namespace {

constexpr std::string_view kLlama = "llama";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, message);
}

double rate(std::size_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
}

std::size_t default_recent(
    const RunSpec& spec,
    std::size_t budget,
    std::span<const LayerShape> layers) {
  const policies::PolicyInfo* const info = policies::find(spec.policy);
  if (info == nullptr || budget <= spec.sinks) return 0;
  const bool windows = std::ranges::any_of(
      layers, [](const LayerShape& layer) { return layer.window != 0; });
  const std::size_t wanted =
      info->recent == nullptr ? budget / 2 : info->recent(budget, windows);
  return std::min(wanted, budget - spec.sinks - 1);
}

std::size_t block_of(const RunSpec& spec) {
  const policies::PolicyInfo* const info = policies::find(spec.policy);
  return spec.block.value_or(info == nullptr ? 1 : info->block);
}

std::string_view merge_of(const RunSpec& spec) {
  if (spec.merge) return *spec.merge;
  const policies::PolicyInfo* const info = policies::find(spec.policy);
  return info == nullptr ? "none" : info->merger;
}

BudgetRule rule_of(const RunSpec& spec) {
  if (!spec.rule) {
    const policies::PolicyInfo* const info = policies::find(spec.policy);
    return info == nullptr ? BudgetRule::kUniform : info->rule;
  }
  const std::string& name = *spec.rule;
  for (const BudgetRule rule :
       {BudgetRule::kUniform, BudgetRule::kPerLayer, BudgetRule::kShared}) {
    if (name == to_string(rule)) return rule;
  }
  refuse("rule: '" + name + "' is not one of uniform, per-layer, shared");
}

}  // namespace

RowFormat format_of(const RunSpec& spec) {
  return spec.cache_type == "int8" ? RowFormat::kInt8 : RowFormat::kSame;
}

bool is_one_shot(const RunSpec& spec) noexcept {
  return spec.protocol == "one-shot";
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names{std::string(kLlama)};
  for (const policies::PolicyInfo& info : policies::all()) {
    names.emplace_back(info.name);
  }
  return names;
}

bool is_bounded(std::string_view policy) {
  return policy != kLlama && policy != "full";
}

bool needs_filters(std::string_view policy) {
  const policies::PolicyInfo* const info = policies::find(policy);
  return info != nullptr && info->needs_filters;
}

namespace {

void check_cache_types(const RunSpec& spec) {
  if (spec.cache_type != "f16" && spec.cache_type != "int8") {
    refuse("cache type: '" + spec.cache_type + "' is not one of f16, int8");
  }
  const std::string& type = spec.llama_cache_type;
  if (type != "f16" && type != "bf16" && type != "q8_0") {
    refuse("cache type: '" + type + "' is not one of f16, bf16, q8_0");
  }
  if (type == "q8_0" && !spec.llama_flash_attention) {
    refuse("cache type: llama.cpp's q8_0 cache needs flash attention on");
  }
}

}  // namespace

void check_spec(const RunSpec& spec) {
  const std::vector<std::string> names = policy_names();
  if (std::find(names.begin(), names.end(), spec.policy) == names.end()) {
    std::string known;
    for (const std::string& name : names) {
      known += (known.empty() ? "" : ", ") + name;
    }
    refuse("policy: unknown name '" + spec.policy + "'; known: " + known);
  }
  if (spec.chunk == 0 || spec.chunk > 65536) {
    refuse("chunk: " + std::to_string(spec.chunk) + " is not in 1..65536");
  }
  if (spec.threads < 1 || spec.threads > kMostThreads) {
    refuse(
        "threads: " + std::to_string(spec.threads) + " is not in 1.." +
        std::to_string(kMostThreads));
  }
  check_cache_types(spec);
  static_cast<void>(rule_of(spec));
  static_cast<void>(policies::make_merger(merge_of(spec), spec.seed));
  if (!is_size(block_of(spec)) || !(spec.floor >= 0 && spec.floor <= 1)) {
    refuse(
        "block: " + std::to_string(block_of(spec)) +
        ", floor: " + std::to_string(spec.floor) +
        ": a block of 1 or more rows and a floor in 0..1 are needed");
  }
  if (!is_one_shot(spec) && spec.protocol != "streaming") {
    refuse(
        "protocol: unknown name '" + spec.protocol +
        "'; known: streaming, one-shot");
  }
  if (is_one_shot(spec) && spec.interval.value_or(0) != 0) {
    refuse(
        "interval: " + std::to_string(*spec.interval) +
        ", but protocol one-shot evicts once, down to the budget");
  }
}

namespace {

std::size_t default_interval(std::size_t budget) {
  return std::max(budget / 16 / kBlockRows, std::size_t{1}) * kBlockRows;
}

}  // namespace

std::optional<Limits> limits_of(
    const RunSpec& spec,
    std::size_t tokens,
    std::span<const LayerShape> layers) {
  if (!is_bounded(spec.policy)) return std::nullopt;
  // Heads of different row counts each leave a part of a block empty.
  const std::size_t unused =
      rule_of(spec) == BudgetRule::kUniform ? 0 : kBlockRows - 1;
  const auto rows_beside = [&](std::size_t interval) {
    return budget_rows(
        spec.budget,
        tokens,
        layers,
        interval + unused,
        llama::native_kv_bytes(layers, spec.chunk),
        format_of(spec));
  };
  Limits limits;
  limits.interval = spec.interval.value_or(is_one_shot(spec) ? 0 : kBlockRows);
  limits.budget = rows_beside(limits.interval);
  if (!spec.interval && !is_one_shot(spec)) {
    limits.interval = default_interval(limits.budget);
    limits.budget = rows_beside(limits.interval);
  }
  limits.sinks = spec.sinks;
  limits.recent =
      spec.recent.value_or(default_recent(spec, limits.budget, layers));
  // Written so that huge values cannot wrap around.
  if (limits.sinks >= limits.budget ||
      limits.recent >= limits.budget - limits.sinks) {
    refuse(
        "budget: " + std::to_string(limits.budget) +
        " rows must be more than sink (" + std::to_string(limits.sinks) +
        ") + recent (" + std::to_string(limits.recent) + ")");
  }
  return limits;
}

std::shared_ptr<const FilterBank> load_run_filters(
    std::string_view policy,
    std::span<const std::string> paths,
    const llama::Model& model) {
  const auto kind = llama::kind_of_policy(policy);
  if (!kind) return nullptr;
  const std::string hint = "make one with `qfilters calibrate --policy " +
                           std::string(policy) +
                           " --model M.gguf --text T.txt --out F`";
  for (const std::string& path : paths) {
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) {
      throw Error(ErrorKind::kFile, "filters: no file " + path + "; " + hint);
    }
    auto filters = std::make_shared<const FilterBank>(load_filters(path));
    if (llama::kind_of(filters->metadata()) != kind) continue;
    llama::check_filters(*filters, model);
    return filters;
  }
  refuse(
      "filters: policy " + std::string(policy) +
      " needs a filter file of its "
      "kind (--filters F)" +
      (paths.empty() ? "" : ", none of these is one") + "; " + hint);
}

Policy make_policy(
    const RunSpec& spec,
    std::shared_ptr<const FilterBank> filters,
    std::span<const LayerShape> layers,
    std::size_t tokens) {
  const std::optional<Limits> limits = limits_of(spec, tokens, layers);
  PolicyOptions rows;
  if (limits) {
    rows.budget = limits->budget;
    rows.protection = {limits->sinks, limits->recent};
    rows.interval = limits->interval;
    rows.seed = spec.seed;
    rows.rule = rule_of(spec);
    rows.floor = spec.floor;
    rows.block = block_of(spec);
    rows.merger = policies::make_merger(merge_of(spec), spec.seed);
  }
  return policies::make(spec.policy, rows, std::move(filters), layers);
}

std::unique_ptr<llama::Session> open_session(
    const RunSpec& spec,
    std::shared_ptr<const llama::Model> model,
    std::shared_ptr<const FilterBank> filters,
    std::size_t tokens) {
  llama::SessionOptions options;
  options.chunk = spec.chunk;
  options.threads = spec.threads;
  options.format = format_of(spec);
  if (spec.policy == kLlama) {
    llama::BaselineOptions baseline;
    baseline.context = tokens;
    baseline.flash_attention = spec.llama_flash_attention;
    baseline.cache_type = spec.llama_cache_type;
    return llama::make_baseline_session(std::move(model), options, baseline);
  }
  Policy policy =
      make_policy(spec, std::move(filters), model->layer_shapes(), tokens);
  return llama::make_engine_session(
      std::move(model), std::move(policy), options);
}

RunRecord start_record(
    const RunSpec& spec,
    std::optional<Limits> limits,
    const llama::Model& model) {
  RunRecord record;
  record.spec = spec;
  record.limits = limits;
  record.model_name = model.name();
  record.layers = model.layer_shapes();
  return record;
}

void add_stats(
    llama::SessionStats& total, const llama::SessionStats& one, bool first) {
  if (first) {
    total = one;
    return;
  }
  total.tokens = std::max(total.tokens, one.tokens);
  total.attention_seconds += one.attention_seconds;
  total.eviction_seconds += one.eviction_seconds;
  total.kv_bytes_peak = std::max(total.kv_bytes_peak, one.kv_bytes_peak);
  total.kv_bytes_full = std::max(total.kv_bytes_full, one.kv_bytes_full);
  total.rows_mean = std::max(total.rows_mean, one.rows_mean);
  total.rows_min = std::min(total.rows_min, one.rows_min);
  total.rows_max = std::max(total.rows_max, one.rows_max);
  total.rows_by_head = one.rows_by_head;
  total.evictions += one.evictions;
}

namespace {

// What was asked for.
Json options_json(const RunRecord& record) {
  const auto limit = [&](std::size_t Limits::*member) {
    return record.limits ? Json((*record.limits).*member) : Json(nullptr);
  };
  Json json;
  json["policy"] = record.spec.policy;
  if (record.spec.policy == kLlama) {
    json["llama"] = {
        {"flash_attention", record.spec.llama_flash_attention},
        {"cache_type", record.spec.llama_cache_type}};
  }
  json["cache_type"] = record.spec.policy == kLlama
                           ? record.spec.llama_cache_type
                           : record.spec.cache_type;
  json["budget"] = limit(&Limits::budget);
  json["budget_asked"] =
      record.limits ? Json(record.spec.budget.text) : Json(nullptr);
  json["sink"] = limit(&Limits::sinks);
  json["recent"] = limit(&Limits::recent);
  json["interval"] = limit(&Limits::interval);
  if (record.limits) {
    json["rule"] = to_string(rule_of(record.spec));
    json["floor"] = record.spec.floor;
    json["block"] = block_of(record.spec);
    json["merge"] = merge_of(record.spec);
  }
  json["protocol"] = record.spec.protocol;
  return json;
}

}  // namespace

Json to_json(const RunRecord& record) {
  const LayerShape shape =
      record.layers.empty() ? LayerShape{} : record.layers.front();
  const llama::SessionStats& stats = record.stats;
  Json json = options_json(record);
  json["chunk"] = record.spec.chunk;
  json["threads"] = record.spec.threads;
  json["isa"] = active_isa();
  json["tokens"] = record.prefill_tokens + record.decode_tokens;
  json["offset"] = stats.tokens;
  json["rows_kept"] = stats.rows_mean;
  json["rows_kept_min"] = stats.rows_min;
  json["rows_kept_max"] = stats.rows_max;
  json["rows_by_head"] =
      stats.rows_by_head.empty() ? Json(nullptr) : Json(stats.rows_by_head);
  json["evictions"] = stats.evictions;
  json["kv_bytes"] = {
      {"peak", stats.kv_bytes_peak}, {"full", stats.kv_bytes_full}};
  if (record.kv_bytes_compressed) {
    json["kv_bytes"]["compressed"] = *record.kv_bytes_compressed;
  }
  json["seconds"] = {
      {"prefill", record.prefill_seconds},
      {"decode", record.decode_seconds},
      {"attention", stats.attention_seconds},
      {"eviction", stats.eviction_seconds}};
  json["tokens_per_second"] = {
      {"prefill", rate(record.prefill_tokens, record.prefill_seconds)},
      {"decode", rate(record.decode_tokens, record.decode_seconds)}};
  json["peak_rss_bytes"] = peak_rss_bytes();
  json["model"] = {
      {"name", record.model_name},
      {"layers", record.layers.size()},
      {"kv_heads", shape.kv_heads},
      {"head_dim", shape.key_dim}};
  return json;
}

std::uint64_t peak_rss_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "VmHWM:") return kibibytes << 10U;
  }
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::uint64_t>(usage.ru_maxrss) << 10U;
}

}  // namespace qfilters::eval
