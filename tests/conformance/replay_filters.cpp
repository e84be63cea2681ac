// Groups calib and artifacts: where filters come from.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "qfilters/calibrator.h"
#include "qfilters/error.h"
#include "qfilters/filter_file.h"

#include "conformance/groups.h"

namespace qfilters::golden {

namespace {

constexpr double kEps = std::numeric_limits<float>::epsilon();

double worst_difference(
    const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  }
  return worst;
}

Outcome within(double worst, double bound) {
  if (worst <= bound) return Outcome::passed();
  return Outcome::failed(
      "differs by " + Json(worst).dump() + ", allowed " + Json(bound).dump());
}

// Both sides work in float64; what is left is rounding to float32.
Outcome replay_compute(const NpzArrays& arrays, const Json& golden) {
  const std::string id = golden.at("id");
  const bool cast = golden.contains("in_dtype");
  const Stream queries(
      dtype_of(golden.value("in_dtype", "float32")),
      arrays[id + (cast ? ".q_bits" : ".q")]);
  const LayerFilters filters = compute_qfilters(
      queries.slice(0, golden.at("N")), golden.at("max_svd_samples"));
  Comparison comparison;
  comparison.is("heads", filters.heads, golden.at("H"))
      .is("dim", filters.dim, golden.at("D"));
  if (!comparison.difference().empty()) {
    return Outcome::failed(comparison.difference());
  }
  return within(
      worst_difference(filters.values, arrays[id + ".filters"].all<float>()),
      kEps);
}

// The rows that are taken show in the bits of the filter: it must be that of
// the golden rows alone.
Outcome replay_subsample(const NpzArrays& arrays, const Json& golden) {
  constexpr std::size_t kDim = 8;
  const std::size_t tokens = golden.at("N");
  const std::size_t samples = golden.at("M");
  const auto rows =
      arrays[golden.at("id").get<std::string>()].all<std::size_t>();
  const auto value = [](std::size_t t, std::size_t d) {
    return static_cast<float>((t * (2 * d + 3) * 2654435761U >> 7U) % 1021) /
               512.0F -
           0.75F;
  };
  const auto make = [&](std::size_t count, bool taken) {
    return Stream(
        DType::kFloat32,
        1,
        1,
        count,
        kDim,
        [&](std::size_t, std::size_t, std::size_t t, std::size_t d) {
          return value(taken ? rows.at(t) : t, d);
        });
  };
  const Stream all = make(tokens, false);
  const Stream taken = make(rows.size(), true);
  Comparison comparison;
  comparison.is("samples", rows.size(), samples)
      .is("filter",
          compute_qfilters(all.slice(0, tokens), samples).values,
          compute_qfilters(taken.slice(0, rows.size()), samples).values);
  return Outcome::failed(comparison.difference());
}

// The reference averages and normalises in float32; the bound is that of its
// sums, which a small mean makes larger.
Outcome replay_gqa(const NpzArrays& arrays, const Json& golden) {
  const std::string id = golden.at("id");
  const std::size_t heads = golden.at("H_q");
  const std::size_t kv_heads = golden.at("n_kv");
  const std::size_t dim = golden.at("D");
  const LayerFilters in{heads, dim, arrays[id + ".in"].all<float>()};
  const LayerFilters out = average_gqa_filters(in, kv_heads);
  const auto expected = arrays[id + ".out"].all<float>();
  if (out.heads != kv_heads || out.values.size() != expected.size()) {
    return Outcome::failed("another shape");
  }
  const std::size_t group = heads / kv_heads;
  for (std::size_t k = 0; k < kv_heads; ++k) {
    double squares = 0;
    std::vector<double> size(dim);
    for (std::size_t d = 0; d < dim; ++d) {
      double mean = 0;
      for (std::size_t g = 0; g < group; ++g) {
        const double x = in.head(k * group + g)[d];
        mean += x / static_cast<double>(group);
        size[d] += std::abs(x) / static_cast<double>(group);
      }
      squares += mean * mean;
    }
    const double norm = std::sqrt(squares);
    for (std::size_t d = 0; d < dim; ++d) {
      const float ours = out.head(k)[d];
      const float golden_value = expected[k * dim + d];
      const auto terms = static_cast<double>(group + dim);
      const double bound = norm > 1e-12 ? terms * kEps * size[d] / norm : 0.0;
      if (std::abs(double{ours} - double{golden_value}) <= bound) continue;
      return Outcome::failed(
          "head " + std::to_string(k) + " [" + std::to_string(d) + "] is " +
          std::to_string(ours) + ", golden " + std::to_string(golden_value));
    }
  }
  return Outcome::passed();
}

// The keys of an estimate: a member, or a part of a pool such as
// "pools.aniso_D64[1,:16]".
Stream estimate_keys(const GoldenSet& set, const Json& golden) {
  const NpzArrays& arrays = set.arrays("calib");
  const std::string id = golden.at("id");
  std::vector<float> values;
  std::size_t dim = 0;
  if (golden.contains("input")) {
    static const std::regex part("pools\\.(\\w+)\\[(\\d+),:(\\d+)\\]");
    const std::string text = golden.at("input");
    std::smatch match;
    if (!std::regex_match(text, match, part)) {
      throw BadFolder("the manifest names the input " + text);
    }
    const Array& pool = set.pools()[match[1]];
    if (pool.shape.size() != 3) throw BadFolder(text + " is not 3-D");
    dim = pool.shape[2];
    values = pool.slice<float>(
        std::stoul(match[2]) * pool.shape[1] * dim, std::stoul(match[3]) * dim);
  } else {
    const Array& array = arrays[id + ".in"];
    dim = array.shape.back();
    values = array.all<float>();
  }
  return {
      DType::kFloat16,
      1,
      1,
      values.size() / dim,
      dim,
      [&](std::size_t, std::size_t, std::size_t t, std::size_t d) {
        return values[t * dim + d];
      }};
}

// The fallback's estimate, as a cache freezes it.
Outcome replay_estimate(const GoldenSet& set, const Json& golden) {
  const Stream keys = estimate_keys(set, golden);
  const std::size_t rows = keys.tokens();
  Config config;
  config.qfilters_budget = static_cast<std::int64_t>(rows) + 8;
  config.qfilters_calib_tokens = static_cast<std::int64_t>(rows);
  QFiltersKVCache cache(config);
  cache.update_and_fetch(keys.slice(0, rows), keys.slice(0, rows));
  const auto found = cache.states().at(0).filter_dir;
  const auto expected =
      set.arrays("calib")[golden.at("id").get<std::string>() + ".filter"]
          .all<float>();
  const double worst = worst_difference(found, expected);
  if (golden.value("degenerate", false)) {
    return within(worst, 0);  // e_(D-1)
  }
  return within(worst, direction_bound(1.0, 0.5));  // not on record: far apart
}

}  // namespace

void replay_calib(const GoldenSet& set, Report& report) {
  const NpzArrays& arrays = set.arrays("calib");
  for (const Json& golden : set.cases("calib")) {
    report.check(golden.at("id"), [&] {
      const std::string op = golden.at("op");
      if (op == "compute_qfilters") return replay_compute(arrays, golden);
      if (op == "subsample_indices") return replay_subsample(arrays, golden);
      if (op == "average_gqa_filters") return replay_gqa(arrays, golden);
      if (op == "estimate_filter_dir") return replay_estimate(set, golden);
      return Outcome::failed("unknown op " + op);
    });
  }
}

namespace {

// What the loader of the reference lets pass and ours must not.
bool is_senseless(const Json& result) {
  if (result.at("layers").empty()) return true;
  for (const Json& layer : result.at("layers")) {
    if (layer.at("shape").size() != 2) return true;
  }
  return false;
}

Outcome compare_bank(const FilterBank& bank, const Json& result) {
  Comparison comparison;
  comparison.is("n_layers", bank.layers(), result.at("n_layers"))
      .is("model_id", bank.metadata().model_id, result.at("model_id"))
      .is("n_samples", bank.metadata().n_samples, result.at("n_samples"))
      .is("dataset", bank.metadata().dataset, result.at("dataset"));
  for (std::size_t l = 0; comparison.difference().empty() && l < bank.layers();
       ++l) {
    const Json& layer = result.at("layers").at(l);
    const LayerFilters& ours = bank.layer(l);
    const std::string at = "layer " + std::to_string(l) + ": ";
    comparison
        .is(at + "shape", std::vector{ours.heads, ours.dim}, layer.at("shape"))
        .is(at + "crc_f32", crc_of(ours.values), layer.at("crc_f32"));
  }
  return Outcome::failed(comparison.difference());
}

Outcome replay_artifact(const GoldenSet& set, const Json& golden) {
  const std::string name = golden.at("id").get<std::string>() + ".npz";
  const auto path = set.folder() / "artifacts" / name;
  std::optional<std::string> expected;
  if (!golden.at("expect_model_id").is_null()) {
    expected = golden.at("expect_model_id").get<std::string>();
  }
  const bool loads = golden.at("ok");
  try {
    const FilterBank bank = load_filters(path, {.model_id = expected});
    if (!loads) return Outcome::failed("it loads");
    return compare_bank(bank, golden.at("result"));
  } catch (const Error& error) {
    Comparison comparison;
    comparison.is(
        "the error names the file",
        std::string(error.what()).find(name) != std::string::npos,
        true);
    if (!loads) {
      const std::string text = golden.at("message");
      const bool other = text.find("was expected") != std::string::npos;
      const auto kind = other ? ErrorKind::kMismatch : ErrorKind::kFile;
      comparison.is("right kind of error", error.kind() == kind, true);
      return Outcome::failed(comparison.difference());
    }
    if (!is_senseless(golden.at("result"))) {
      return Outcome::failed(error.what());
    }
    comparison.is("kFile", error.kind() == ErrorKind::kFile, true);
    if (!comparison.difference().empty()) {
      return Outcome::failed(comparison.difference());
    }
    const std::string text = error.what();
    return Outcome::decided(
        kLoaderRule, "refused: " + text.substr(text.find(name)));
  }
}

}  // namespace

void replay_artifacts(const GoldenSet& set, Report& report) {
  for (const Json& golden : set.cases("artifacts")) {
    std::string id = golden.at("id");
    if (!golden.at("expect_model_id").is_null()) {
      id += " expecting " + golden.at("expect_model_id").dump();
    }
    report.check(id, [&] { return replay_artifact(set, golden); });
  }
}

}  // namespace qfilters::golden
