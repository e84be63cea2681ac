// Group construct: options, shapes and what is refused, and how.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "qfilters/calibrator.h"
#include "qfilters/error.h"

#include "conformance/groups.h"

namespace qfilters::golden {

namespace {

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// How an error of the reference, known by a part of its text, reads here.
struct Refusal {
  const char* reference;
  ErrorKind kind;
  const char* ours;
};

constexpr std::array kRefusals = {
    Refusal{
        "qfilters_on_low_retention must",
        ErrorKind::kInvalidArgument,
        "qfilters_on_low_retention"},
    Refusal{
        "qfilters_min_retention must",
        ErrorKind::kInvalidArgument,
        "qfilters_min_retention"},
    Refusal{"sign must", ErrorKind::kInvalidArgument, "qfilters_sign"},
    Refusal{"n_sink (", ErrorKind::kInvalidArgument, "qfilters_budget"},
    Refusal{
        "use_metal_kernels=True", ErrorKind::kUnsupported, "use_metal_kernels"},
    Refusal{"calibrated filters are", ErrorKind::kMismatch, "filters"},
    Refusal{"[concatenate]", ErrorKind::kShape, "update_and_fetch"},
    Refusal{"need N >= 2", ErrorKind::kInvalidArgument, "tokens=1"},
    Refusal{
        "max_svd_samples must", ErrorKind::kInvalidArgument, "max_svd_samples"},
    Refusal{"n_kv_heads", ErrorKind::kInvalidArgument, "kv_heads"},
    // A rank is part of the type here; the nearest fault is a wrong size.
    Refusal{"filters must be 2-D", ErrorKind::kShape, "FilterBank"},
    Refusal{"expected [H, N, D]", ErrorKind::kShape, "compute_qfilters"},
    Refusal{"expected [H_q, D]", ErrorKind::kShape, "average_gqa_filters"},
};

// `error` is what the golden refusal reads like here.
Outcome compare_refusal(
    const std::optional<Error>& error, const std::string& message) {
  for (const Refusal& refusal : kRefusals) {
    if (message.find(refusal.reference) == std::string::npos) continue;
    if (!error) return Outcome::failed("accepted, golden: " + message);
    const std::string text = error->what();
    if (error->kind() == refusal.kind &&
        text.find(refusal.ours) != std::string::npos) {
      return Outcome::passed();
    }
    std::string both = "refused with '" + text;
    both += "', golden: " + message;
    return Outcome::failed(both);
  }
  return Outcome::failed("no rule for the golden error: " + message);
}

// Sets one option; false where C++ has no such value and the nearest is taken.
bool set_option(Config& config, const std::string& key, const Json& value) {
  const std::vector<std::pair<std::string, std::int64_t Config::*>> integers = {
      {"qfilters_budget", &Config::qfilters_budget},
      {"qfilters_n_sink", &Config::qfilters_n_sink},
      {"qfilters_recent", &Config::qfilters_recent},
      {"qfilters_calib_tokens", &Config::qfilters_calib_tokens},
      {"qfilters_sign", &Config::qfilters_sign}};
  for (const auto& [name, member] : integers) {
    if (key != name) continue;
    if (value.is_number_integer()) {
      config.*member = value.get<std::int64_t>();
      return true;
    }
    // The reference calls int(): 1.9 counts as 1. Other types have no place.
    if (value.is_number()) {
      config.*member = static_cast<std::int64_t>(value.get<double>());
    }
    return false;
  }
  if (key == "qfilters_min_retention") {
    config.qfilters_min_retention.reset();
    if (value == "nan") {
      config.qfilters_min_retention = std::numeric_limits<double>::quiet_NaN();
    } else if (!value.is_null()) {
      config.qfilters_min_retention = value.get<double>();
    }
    return true;
  }
  if (key == "qfilters_on_low_retention") {
    const bool text = value.is_string();
    config.qfilters_on_low_retention = text ? value.get<std::string>() : "None";
    return text;
  }
  if (key != "use_metal_kernels") {
    throw BadFolder("the manifest has an option " + key);
  }
  if (value.is_boolean()) config.use_metal_kernels = value.get<bool>();
  return true;
}

Outcome compare_options(const Config& config, const Json& result) {
  Comparison comparison;
  Json floor;  // null
  if (config.qfilters_min_retention) floor = *config.qfilters_min_retention;
  comparison.is("budget", config.qfilters_budget, result.at("budget"))
      .is("n_sink", config.qfilters_n_sink, result.at("n_sink"))
      .is("recent", config.qfilters_recent, result.at("recent"))
      .is("calib", config.qfilters_calib_tokens, result.at("calib"))
      .is("sign", config.qfilters_sign, result.at("sign"))
      .is("min_retention", floor, result.at("min_retention"));
  return Outcome::failed(comparison.difference());
}

// The filters of a case; with a rank other than 2, a shape that does not fit
// the number of values.
std::optional<LayerFilters> filters_of(const Json& shape) {
  if (shape.is_null()) return std::nullopt;
  std::size_t size = 1;
  for (const Json& axis : shape) {
    size *= axis.get<std::size_t>();
  }
  return LayerFilters{
      shape.at(0).get<std::size_t>(),
      shape.size() > 1 ? shape.at(1).get<std::size_t>() : 0,
      std::vector<float>(size, 1.0F)};
}

bool is_senseless(const Config& config) {
  return config.qfilters_calib_tokens < 1 || config.qfilters_n_sink < 0 ||
         config.qfilters_recent < 0;
}

Outcome replay_options(const Json& golden) {
  Config config;
  bool expressible = true;
  for (const auto& item : golden.at("config").items()) {
    expressible = set_option(config, item.key(), item.value()) && expressible;
  }
  const Json& shape = golden.at("filter_shape");
  const auto filters = filters_of(shape);
  const bool has_rank = shape.is_null() || shape.size() == 2;
  std::optional<Config> accepted;
  const auto error = error_of([&] {
    accepted = filters ? QFiltersKVCache(config, *filters).config()
                       : QFiltersKVCache(config).config();
  });
  const std::string text = error ? error->what() : "accepted";
  if (golden.at("ok")) {
    if (is_senseless(config)) {
      if (!error || error->kind() != ErrorKind::kInvalidArgument ||
          text.find("must be at least") == std::string::npos) {
        return Outcome::failed(text);
      }
      return Outcome::decided(kConfigRule, "refused: " + text);
    }
    if (error) return Outcome::failed(text);
    Outcome same = compare_options(*accepted, golden.at("result"));
    if (expressible || !same.difference.empty()) return same;
    return Outcome::decided(kTypeRule, "the nearest value");
  }
  const std::string message = golden.value("message", "");
  if (!has_rank && message.find("must be 2-D") != std::string::npos) {
    // Options are checked before filters, whose rank the type gives.
    const bool about_options =
        error && error_of([&] { validate(config); }).has_value();
    if (about_options && error->kind() == ErrorKind::kInvalidArgument) {
      return Outcome::decided(kTypeRule, "refused: " + text);
    }
    Outcome refused = compare_refusal(error, message);
    if (!refused.difference.empty()) return refused;
    return Outcome::decided(kTypeRule, "refused: " + text);
  }
  Outcome refused = compare_refusal(error, message);
  if (expressible || !refused.difference.empty()) return refused;
  return Outcome::decided(kTypeRule, "its text 'None' is refused: " + text);
}

Stream ones(
    std::size_t batch, std::size_t heads, std::size_t tokens, std::size_t dim) {
  return {
      DType::kFloat16,
      batch,
      heads,
      tokens,
      dim,
      [](std::size_t, std::size_t, std::size_t, std::size_t) { return 1.0F; }};
}

LayerFilters filter_ones(std::size_t heads, std::size_t dim) {
  return {heads, dim, std::vector<float>(heads * dim, 1.0F)};
}

// first_update_B1H3D64_filters2x64: two tokens into a new cache.
Outcome replay_first_update(const Json& golden, const std::smatch& sizes) {
  const auto size = [&](std::size_t i) { return std::stoul(sizes[i]); };
  QFiltersKVCache cache({}, filter_ones(size(4), size(5)));
  constexpr std::size_t kTokens = 2;
  const auto feed = [&](std::size_t b, std::size_t h, std::size_t d) {
    const Stream rows = ones(b, h, kTokens, d);
    cache.update_and_fetch(rows.slice(0, kTokens), rows.slice(0, kTokens));
  };
  const auto error = error_of([&] { feed(size(1), size(2), size(3)); });
  Comparison comparison;
  if (golden.at("ok")) {
    comparison.is("refused", error.has_value(), false)
        .is("offset", cache.offset(), kTokens);
    return Outcome::failed(comparison.difference());
  }
  Outcome refused =
      compare_refusal(error, golden.at("message").get<std::string>());
  if (!refused.difference.empty()) return refused;
  comparison.is("empty after the refusal", cache.empty(), true)
      .is("tokens_seen", cache.tokens_seen(), 0);
  feed(1, size(4), size(5));  // a corrected update works
  comparison.is("offset", cache.offset(), kTokens);
  return Outcome::failed(comparison.difference());
}

// second_update_cal_1x2x3x32: after an update of [1, 2, 3, 64].
Outcome replay_second_update(const Json& golden, const std::smatch& sizes) {
  const auto size = [&](std::size_t i) { return std::stoul(sizes[i]); };
  auto cache = sizes[1] == "cal" ? QFiltersKVCache({}, filter_ones(2, 64))
                                 : QFiltersKVCache(Config{});
  const Stream first = ones(1, 2, 3, 64);
  cache.update_and_fetch(first.slice(0, 3), first.slice(0, 3));
  const Stream second = ones(size(2), size(3), size(4), size(5));
  std::vector<std::size_t> returned;
  const auto error = error_of([&] {
    const TensorView rows = second.slice(0, second.tokens());
    const RowsView view = cache.update_and_fetch(rows, rows);
    const RowShape& shape = view.shape();
    returned = {shape.batch, shape.kv_heads, view.rows(0), shape.key_dim};
  });
  const Json& after = golden.at("after");
  Comparison comparison;
  comparison.is("offset", cache.offset(), after.at("offset"))
      .is("tokens_seen", cache.tokens_seen(), after.at("tokens_seen"))
      .is("full_seq_bytes", cache.full_seq_bytes(), after.at("full_seq_bytes"))
      .is("tokens_kept", cache.tokens_kept(), after.at("tokens_kept"));
  if (golden.at("ok")) {
    comparison.is("returned", returned, golden.at("result").at(0));
    return Outcome::failed(comparison.difference());
  }
  Outcome refused =
      compare_refusal(error, golden.at("message").get<std::string>());
  if (!refused.difference.empty()) return refused;
  return Outcome::failed(comparison.difference());
}

template <typename Cache>
constexpr bool has_merge() {
  return requires {
    &Cache::merge;
  };
}

Outcome replay_empty(const Json& golden) {
  const QFiltersKVCache cache{Config{}};
  const Json& result = golden.at("result");
  Comparison comparison;
  comparison.is("tokens_kept", cache.tokens_kept(), result.at("tokens_kept"))
      .is("tokens_seen", cache.tokens_seen(), result.at("tokens_seen"))
      .is("compression_ratio",
          cache.compression_ratio(),
          result.at("compression_ratio"))
      .is("kept_bytes", cache.qfilters_kept_bytes(), result.at("kept_bytes"))
      .is("full_seq_bytes", cache.full_seq_bytes(), result.at("full_seq_bytes"))
      .is("nbytes", cache.nbytes(), result.at("nbytes"))
      .is("offset", cache.offset(), result.at("offset"))
      .is("is_trimmable", cache.is_trimmable(), result.at("is_trimmable"))
      .is("has_merge", has_merge<QFiltersKVCache>(), result.at("has_merge"))
      .is("empty", cache.empty(), result.at("empty"))
      .is("size", cache.size(), result.at("size"));
  return Outcome::failed(comparison.difference());
}

// Calls that the reference refuses, by case id. A rank is part of the type in
// C++; there the nearest fault is tried: a batch, or too few values.
std::optional<Outcome> replay_call(const Json& golden) {
  const std::string id = golden.at("id");
  const auto compute =
      [](std::size_t batch, std::size_t tokens, std::size_t samples) {
        const Stream queries = ones(batch, 3, tokens, 4);
        static_cast<void>(compute_qfilters(queries.slice(0, tokens), samples));
      };
  const auto average = [](const LayerFilters& in, std::size_t kv_heads) {
    static_cast<void>(average_gqa_filters(in, kv_heads));
  };
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"compute_rank", [&] { compute(2, 4, 3000); }},
      {"compute_n1", [&] { compute(1, 1, 3000); }},
      {"compute_max1", [&] { compute(1, 4, 1); }},
      {"gqa_rank",
       [&] {
         average({4, 0, {1, 1, 1, 1}}, 2);
       }},
      {"gqa_zero", [&] { average(filter_ones(4, 8), 0); }},
      {"gqa_indivisible", [&] { average(filter_ones(4, 8), 3); }}};
  for (const auto& [name, call] : calls) {
    if (id != name) continue;
    const auto error = error_of(call);
    Outcome refused =
        compare_refusal(error, golden.at("message").get<std::string>());
    if (!id.ends_with("_rank") || !refused.difference.empty()) return refused;
    return Outcome::decided(
        kTypeRule, std::string("refused: ") + error->what());
  }
  return std::nullopt;
}

Outcome replay_case(const Json& golden) {
  static const std::regex first(
      "first_update_B(\\d+)H(\\d+)D(\\d+)_filters(\\d+)x(\\d+)");
  static const std::regex second(
      "second_update_(cal|fb)_(\\d+)x(\\d+)x(\\d+)x(\\d+)");
  if (golden.contains("config")) return replay_options(golden);
  const std::string id = golden.at("id");
  std::smatch sizes;
  if (std::regex_match(id, sizes, first)) {
    return replay_first_update(golden, sizes);
  }
  if (std::regex_match(id, sizes, second)) {
    return replay_second_update(golden, sizes);
  }
  if (id == "empty_properties") return replay_empty(golden);
  const auto called = replay_call(golden);
  return called ? *called : Outcome::failed("unknown case");
}

}  // namespace

void replay_construct(const GoldenSet& set, Report& report) {
  for (const Json& golden : set.cases("construct")) {
    report.check(golden.at("id"), [&] { return replay_case(golden); });
  }
}

}  // namespace qfilters::golden
