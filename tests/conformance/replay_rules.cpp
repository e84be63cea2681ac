// Groups edge, retention and mask: non-finite scores, ties, the retention
// floor and attention masks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/error.h"

#include "conformance/groups.h"

namespace qfilters::golden {

namespace {

enum class Rule { kReference, kOurs };

// The selection rule as a plain sort of row indices: the reference's (a
// protected row gets +inf added, NaN outranks all) or ours (decision A3).
std::vector<std::size_t> survivors(
    const std::vector<float>& scores, const Config& config, Rule rule) {
  const std::size_t rows = scores.size();
  const auto budget = static_cast<std::size_t>(config.qfilters_budget);
  const auto sinks = static_cast<std::size_t>(config.qfilters_n_sink);
  const auto recent = static_cast<std::size_t>(config.qfilters_recent);
  std::vector<std::size_t> order(rows);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (rows <= budget) return order;
  const auto is_protected = [&](std::size_t i) {
    return i < sinks || rows - i <= recent;
  };
  // Greater = kept; {class, score}.
  const auto rank = [&](std::size_t i) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    float score = scores[i];
    if (rule == Rule::kReference) {
      if (is_protected(i)) score = score + kInfinity;
      return std::isnan(score) ? std::pair(1, 0.0F) : std::pair(0, score);
    }
    if (is_protected(i)) return std::pair(1, 0.0F);
    return std::isnan(score) ? std::pair(-1, 0.0F) : std::pair(0, score);
  };
  std::stable_sort(
      order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return rank(a) < rank(b);
      });
  order.erase(order.begin(), order.end() - config.qfilters_budget);
  std::sort(order.begin(), order.end());
  return order;
}

// Tokens that stay of a stream of scores, in one block or token by token.
std::vector<std::int32_t> kept_tokens(
    const std::vector<float>& scores,
    std::size_t chunk,
    const Config& config,
    Rule rule) {
  std::vector<std::int32_t> kept;
  for (std::size_t token = 0; token < scores.size();) {
    for (std::size_t i = 0; i < chunk && token < scores.size(); ++i) {
      kept.push_back(static_cast<std::int32_t>(token++));
    }
    std::vector<float> candidates;
    candidates.reserve(kept.size());
    for (const std::int32_t t : kept) {
      candidates.push_back(scores[static_cast<std::size_t>(t)]);
    }
    std::vector<std::int32_t> next;
    for (const std::size_t i : survivors(candidates, config, rule)) {
      next.push_back(kept[i]);
    }
    kept = std::move(next);
  }
  return kept;
}

bool same_scores(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return x == y || (std::isnan(x) && std::isnan(y));
      });
}

// float32, d = 0 .. D-1 in order, over keys rounded to float16.
std::vector<float> edge_scores(
    const Stream& keys, const std::vector<float>& filter, float sign) {
  std::vector<float> scores;
  for (std::size_t t = 0; t < keys.tokens(); ++t) {
    float sum = 0;
    for (std::size_t d = 0; d < filter.size(); ++d) {
      const auto key =
          static_cast<float>(from_half(to_half(keys.at(0, 0, t, d))));
      sum += key * filter[d];
    }
    scores.push_back(sign * sum);
  }
  return scores;
}

Stream edge_keys(
    const NpzArrays& arrays, const std::string& id, std::size_t dim) {
  if (!arrays.has(id + ".lane0")) {
    return {DType::kFloat32, arrays[id + ".keys_f32"]};
  }
  const auto lane = arrays[id + ".lane0"].all<float>();
  return {
      DType::kFloat32,
      1,
      1,
      lane.size(),
      dim,
      [&](std::size_t, std::size_t, std::size_t t, std::size_t d) {
        return d == 0 ? lane[t] : 0.0F;
      }};
}

Outcome replay_edge_case(const NpzArrays& arrays, const Json& golden) {
  const std::string id = golden.at("id");
  const std::size_t dim = golden.at("D");
  const Config config = config_of(golden);
  const Stream keys = edge_keys(arrays, id, dim);
  const auto filter = arrays["filter"].all<float>();
  QFiltersKVCache cache(config, LayerFilters{1, dim, filter});
  const std::size_t chunk =
      golden.at("mode") == "block" ? keys.tokens() : std::size_t{1};
  for (std::size_t t = 0; t < keys.tokens(); t += chunk) {
    cache.update_and_fetch(keys.slice(t, chunk), keys.slice(t, chunk));
  }

  const auto all =
      edge_scores(keys, filter, static_cast<float>(config.qfilters_sign));
  const auto scores_of = [&](const std::vector<std::int32_t>& tokens) {
    std::vector<float> out;
    out.reserve(tokens.size());
    for (const std::int32_t t : tokens) {
      out.push_back(all[static_cast<std::size_t>(t)]);
    }
    return out;
  };
  const auto non_finite = static_cast<std::uint64_t>(std::count_if(
      all.begin(), all.end(), [](float s) { return !std::isfinite(s); }));
  const auto right = kept_tokens(all, chunk, config, Rule::kOurs);
  const auto golden_kept = arrays[id + ".kept"].all<std::int32_t>();
  const auto golden_scores = arrays[id + ".scores"].all<float>();
  Comparison comparison;
  comparison.is("kept rows", cache.positions(), right)
      .is("non_finite_scores", cache.non_finite_scores(), non_finite)
      .is("the rule of the reference",
          kept_tokens(all, chunk, config, Rule::kReference),
          golden_kept)
      .is("scores agree", same_scores(cache.scores(), scores_of(right)), true)
      .is("golden scores agree",
          same_scores(golden_scores, scores_of(golden_kept)),
          true);
  if (!comparison.difference().empty() || right == golden_kept) {
    return Outcome::failed(comparison.difference());
  }
  if (non_finite == 0) return Outcome::failed("differs with finite scores");
  return Outcome::decided(
      kNonFiniteRule,
      "kept " + Json(right).dump() + ", reference " + Json(golden_kept).dump());
}

}  // namespace

void replay_edge(const GoldenSet& set, Report& report) {
  const NpzArrays& arrays = set.arrays("edge");
  for (const Json& golden : set.cases("edge")) {
    report.check(
        golden.at("id"), [&] { return replay_edge_case(arrays, golden); });
  }
}

namespace {

// Where the reference left `offset` behind in the update that raised, so that
// the tokens of the next update got positions that are too small.
struct Stale {
  std::size_t by = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;

  [[nodiscard]] std::vector<std::int32_t> positions(
      std::vector<std::int32_t> right) const {
    for (std::int32_t& at : right) {
      if (at >= first && at < last) at -= static_cast<std::int32_t>(by);
    }
    return right;
  }
};

class RetentionCase {
 public:
  RetentionCase(const GoldenSet& set, const Json& golden)
      : golden_(golden),
        source_(source_of(golden)),
        keys_(selection_keys(set, source_)),
        values_(values_for(source_)),
        cache_(make(set, golden.at("policy"))),
        quiet_(make(set, "ignore")) {
    cache_.on_warning([this](std::string_view text) {
      ++warned_;
      message_ = text;
    });
  }

  Outcome replay() {
    std::size_t token = 0;
    std::string right;
    bool differs = false;
    bool moved = false;
    Stale stale;
    for (const Json& step : golden_.at("trace")) {
      const std::size_t count = step.at("S");
      const bool raised = update(token, count);
      token += count;
      const std::size_t behind = step.at("raised") == 1 ? count : 0;
      const std::string at = "token " + std::to_string(token) + ": ";
      Comparison comparison;
      compare(step, token, raised, comparison);
      const auto positions = cache_.positions();
      comparison
          .is(at + "offset less what the reference forgot",
              cache_.offset() - behind,
              step.at("offset"))
          .is(at + "positions, as the reference counts them",
              stale.positions(positions),
              step.at("positions_h0"));
      if (!comparison.difference().empty()) {
        return Outcome::failed(comparison.difference());
      }
      if (behind > 0) {
        differs = true;
        right = "offset " + std::to_string(cache_.offset()) +
                " after the error, reference " + step.at("offset").dump();
      }
      if (Json(positions) != step.at("positions_h0")) {
        if (!moved) {  // the first of them will do
          right += "; then positions " + Json(positions).dump() +
                   ", reference " + step.at("positions_h0").dump();
        }
        moved = true;
        differs = true;
      }
      stale = Stale{
          .by = behind > 0 ? behind : stale.by,
          .first = behind > 0 ? static_cast<std::int32_t>(token) : stale.first,
          .last = behind > 0 ? next_end(step, token) : stale.last};
    }
    if (!differs) return Outcome::passed();
    return Outcome::decided(kOffsetRule, right);
  }

 private:
  static Source source_of(const Json& golden) {
    std::size_t tokens = 0;
    for (const Json& step : golden.at("trace")) {
      tokens += step.at("S").get<std::size_t>();
    }
    return {
        golden.at("B"),
        golden.at("H"),
        tokens,
        golden.at("D"),
        golden.at("row0"),
        golden.at("kind"),
        DType::kFloat16};
  }

  [[nodiscard]] QFiltersKVCache make(
      const GoldenSet& set, const std::string& policy) const {
    Config config = config_of(golden_);
    config.qfilters_on_low_retention = policy;
    config.qfilters_min_retention.reset();
    if (!golden_.at("min_retention").is_null()) {
      config.qfilters_min_retention = golden_.at("min_retention").get<double>();
    }
    if (!golden_.at("calibrated")) return QFiltersKVCache(config);
    return {
        config, pool_filters(set, source_.kind, source_.heads, source_.dim)};
  }

  bool update(std::size_t token, std::size_t count) {
    const TensorView keys = keys_.slice(token, count);
    const TensorView values = values_.slice(token, count);
    warned_ = 0;
    message_.clear();
    quiet_.update_and_fetch(keys, values);
    try {
      cache_.update_and_fetch(keys, values);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kLowRetention) throw;
      message_ = error.what();
      return true;
    }
    return false;
  }

  // `token` tokens have passed. Whatever the policy, the state is that of a
  // cache that says nothing.
  void compare(
      const Json& step,
      std::size_t token,
      bool raised,
      Comparison& comparison) {
    const std::string at = "token " + std::to_string(token) + ": ";
    comparison.is(at + "warned", warned_, step.at("warned"))
        .is(at + "raised", raised ? 1 : 0, step.at("raised"))
        .is(at + "tokens_seen", cache_.tokens_seen(), step.at("tokens_seen"))
        .is(at + "kept", cache_.tokens_kept(), step.at("kept"))
        .is(at + "stored_rows", cache_.stored().rows(0), step.at("stored_rows"))
        .is(at + "right offset", cache_.offset(), token)
        .is(at + "right positions", cache_.positions(), quiet_.positions());
    const std::string counts = std::to_string(cache_.tokens_kept()) + " of " +
                               std::to_string(token) + " tokens";
    const bool said = message_.find(counts) != std::string::npos;
    const bool must = !step.at("msg").get<std::string>().empty();
    comparison.is(at + "the message names the counts", said, must);
  }

  // End of the update that follows `step`.
  [[nodiscard]] std::int32_t next_end(
      const Json& step, std::size_t token) const {
    bool found = false;
    for (const Json& other : golden_.at("trace")) {
      if (found) {
        return static_cast<std::int32_t>(
            token + other.at("S").get<std::size_t>());
      }
      found = &other == &step;
    }
    return static_cast<std::int32_t>(token);
  }

  const Json& golden_;
  Source source_;
  Stream keys_;
  Stream values_;
  QFiltersKVCache cache_;
  QFiltersKVCache quiet_;
  int warned_ = 0;
  std::string message_;
};

}  // namespace

void replay_retention(const GoldenSet& set, Report& report) {
  for (const Json& golden : set.cases("retention")) {
    report.check(
        golden.at("id"), [&] { return RetentionCase(set, golden).replay(); });
  }
}

namespace {

Outcome replay_mask_case(const GoldenSet& set, const Json& golden) {
  const NpzArrays& arrays = set.arrays("mask");
  Source source{2, 2, 0, 64, 11, "grid", DType::kFloat16};
  for (const Json& size : golden.at("sizes")) {
    source.tokens += size.get<std::size_t>();
  }
  const Stream keys = selection_keys(set, source);
  QFiltersKVCache cache(
      config_of(golden),
      pool_filters(set, source.kind, source.heads, source.dim));
  std::size_t token = 0;
  for (const Json& size : golden.at("sizes")) {
    const std::size_t count = size;
    cache.update_and_fetch(keys.slice(token, count), keys.slice(token, count));
    token += count;
  }
  const Json& window = golden.at("window");
  const AttentionMask mask = cache.make_mask(
      golden.at("N"),
      golden.at("return_array"),
      window.is_null() ? std::size_t{0} : window.get<std::size_t>());

  Comparison comparison;
  const Json& result = golden.at("result");
  const auto kind = result.is_null()     ? AttentionMask::Kind::kNone
                    : result == "causal" ? AttentionMask::Kind::kCausal
                                         : AttentionMask::Kind::kArray;
  comparison.is("kind", static_cast<int>(mask.kind), static_cast<int>(kind));
  if (kind == AttentionMask::Kind::kArray) {
    // The reference leaves batch and heads out before the first update.
    const Json shape = golden.at("shape").size() == 2
                           ? Json({mask.queries, mask.keys})
                           : Json({mask.batch, 1, mask.queries, mask.keys});
    comparison.is("shape", shape, golden.at("shape"))
        .is("mask",
            mask.allowed,
            arrays[golden.at("id").get<std::string>()].all<std::uint8_t>());
  }
  const std::string stored = "m" + golden.at("state").dump() + "_positions";
  if (arrays.has(stored)) {
    std::vector<std::int32_t> positions;
    for (std::size_t g = 0; g < source.batch * source.heads; ++g) {
      const auto some = cache.positions(g);
      positions.insert(positions.end(), some.begin(), some.end());
    }
    comparison.is("positions", positions, arrays[stored].all<std::int32_t>());
  }
  return Outcome::failed(comparison.difference());
}

}  // namespace

void replay_mask(const GoldenSet& set, Report& report) {
  for (const Json& golden : set.cases("mask")) {
    report.check(
        golden.at("id"), [&] { return replay_mask_case(set, golden); });
  }
}

}  // namespace qfilters::golden
