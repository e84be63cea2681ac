// What policy auto is fitted to, worked out from the definition.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/filter_bank.h"

#include "adapters/models.h"
#include "adapters/plain_attention.h"
#include "llama/calibrate.h"
#include "llama/cue.h"

namespace qfilters::llama {
namespace {

using testing::attention_of;
using testing::dot;
using testing::hear_text;
using testing::Heard;
using testing::load_tiny;
using testing::Row;
using testing::Rows;
using testing::some_tokens;

// What calibration learns of one head: keys, and what each turned out to be
// worth.
struct Lessons {
  Rows keys;
  Row facts;
  Row fluency;
};

// Of a passage of `tokens` tokens, heard in micro-batches of `chunk` and then
// again behind a cue.
void add_lessons(
    const Heard& heard,
    std::size_t head,
    std::size_t tokens,
    std::size_t chunk,
    Lessons& out) {
  const Rows& keys = heard.keys[head];
  Row later(tokens);
  Row again(tokens);
  for (std::size_t q = 0; q < heard.share(); ++q) {
    const Rows& queries = heard.queries[head * heard.share() + q];
    for (std::size_t t = 0; t < queries.size(); ++t) {
      const Row paid =
          attention_of(heard, queries[t], std::span(keys).first(t + 1));
      for (std::size_t r = 0; r < std::min(t + 1, tokens); ++r) {
        if (t >= tokens) again[r] = std::max(again[r], paid[r]);
        if (t < tokens && t / chunk > r / chunk) later[r] += paid[r];
      }
    }
  }
  // Neither sinks nor the last eighth, nor what no later micro-batch sees.
  const std::size_t end =
      std::min(tokens - tokens / 8, (tokens - 1) / chunk * chunk);
  for (std::size_t r = 8; r < end; ++r) {
    const std::size_t behind = tokens - (r / chunk + 1) * chunk;
    out.keys.push_back(keys[r]);
    out.facts.push_back(std::log(again[r] + 1e-8));
    out.fluency.push_back(
        1.5 * std::log(later[r] / static_cast<double>(behind) + 1e-8));
  }
}

// What is behind the first of each head's lessons is judged against the upper
// median of all of it.
void level(
    std::vector<std::vector<Lessons>>& layers,
    const std::vector<std::vector<std::size_t>>& firsts,
    Row Lessons::*worth) {
  Row all;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t h = 0; h < layers[l].size(); ++h) {
      const Row& row = layers[l][h].*worth;
      all.insert(
          all.end(),
          row.begin() + static_cast<std::ptrdiff_t>(firsts[l][h]),
          row.end());
    }
  }
  std::ranges::sort(all);
  const double median = all[all.size() / 2];
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t h = 0; h < layers[l].size(); ++h) {
      Row& row = layers[l][h].*worth;
      for (std::size_t r = firsts[l][h]; r < row.size(); ++r)
        row[r] -= median;
    }
  }
}

// Dimensions, their squares and the norm, each less its mean and in standard
// deviations.
struct Standardised {
  std::vector<Row> columns;  // [term][key]
  Row mean;
  Row deviation;

  explicit Standardised(const Rows& keys) {
    const std::size_t dim = keys[0].size();
    columns.resize(2 * dim + 1);
    for (const Row& key : keys) {
      for (std::size_t d = 0; d < dim; ++d) {
        columns[d].push_back(key[d]);
        columns[dim + d].push_back(key[d] * key[d]);
      }
      columns[2 * dim].push_back(std::sqrt(dot(key, key)));
    }
    for (Row& column : columns) {
      const auto count = static_cast<double>(column.size());
      mean.push_back(dot(column, Row(column.size(), 1)) / count);
      for (double& x : column) {
        x -= mean.back();
      }
      deviation.push_back(std::sqrt(dot(column, column) / count));
      for (double& x : column) {
        x /= deviation.back();
      }
    }
  }
};

// Solves a x = b by elimination; `a` is symmetric and positive.
Row solve(std::vector<Row> a, Row b) {
  for (std::size_t i = 0; i < b.size(); ++i) {
    for (std::size_t j = i + 1; j < b.size(); ++j) {
      const double factor = a[j][i] / a[i][i];
      for (std::size_t k = i; k < b.size(); ++k) {
        a[j][k] -= factor * a[i][k];
      }
      b[j] -= factor * b[i];
    }
  }
  for (std::size_t i = b.size(); i-- > 0;) {
    for (std::size_t k = i + 1; k < b.size(); ++k) {
      b[i] -= a[i][k] * b[k];
    }
    b[i] /= a[i][i];
  }
  return b;
}

// The ridge regression of worth on a key's terms has these coefficients.
void expect_fitted(
    const Rows& keys, const Row& worth, std::span<const float> found) {
  const Standardised terms(keys);
  const std::size_t size = terms.columns.size();
  const auto count = static_cast<double>(worth.size());
  std::vector<Row> normal(size, Row(size));
  Row with_worth;
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t j = 0; j < size; ++j) {
      normal[i][j] = dot(terms.columns[i], terms.columns[j]) / count;
    }
    normal[i][i] += 1e-3;
    with_worth.push_back(dot(terms.columns[i], worth) / count);
  }
  const Row want = solve(normal, with_worth);
  double constant = dot(worth, Row(worth.size(), 1)) / count;
  ASSERT_EQ(found.size(), size + 1);
  for (std::size_t i = 0; i < size; ++i) {
    EXPECT_NEAR(found[i] * terms.deviation[i], want[i], 1e-4) << i;
    constant -= want[i] / terms.deviation[i] * terms.mean[i];
  }
  EXPECT_NEAR(found[size], constant, 1e-4);
}

// [layer][head]; none for windowed layers.
std::vector<std::vector<Lessons>> lessons_of(
    const std::shared_ptr<const Model>& model,
    std::span<const Token> tokens,
    std::span<const Token> cue,
    std::size_t context,
    std::size_t chunk) {
  std::vector<std::vector<Lessons>> out(model->layers().size());
  for (std::size_t begin = 0; begin < tokens.size(); begin += context) {
    const auto passage =
        tokens.subspan(begin, std::min(context, tokens.size() - begin));
    std::vector<Token> text(passage.begin(), passage.end());
    text.insert(text.end(), cue.begin(), cue.end());
    text.insert(text.end(), passage.begin(), passage.end());
    const std::vector<Heard> heard = hear_text(model, text, chunk);
    std::vector<std::vector<std::size_t>> firsts(heard.size());
    for (std::size_t l = 0; l < heard.size(); ++l) {
      if (model->layers()[l].window != 0) continue;
      out[l].resize(heard[l].keys.size());
      for (std::size_t h = 0; h < out[l].size(); ++h) {
        firsts[l].push_back(out[l][h].keys.size());
        add_lessons(heard[l], h, passage.size(), chunk, out[l][h]);
      }
    }
    level(out, firsts, &Lessons::facts);
    level(out, firsts, &Lessons::fluency);
  }
  return out;
}

TEST(CalibrateReconstructionTest, FitsWhatKeysTurnOutToBeWorth) {
  CalibrateOptions options;
  options.context = 150;
  for (const char* const name : {"llama_ok", "gemma_swa", "softcap"}) {
    SCOPED_TRACE(name);
    const auto model = load_tiny(name);
    if (model == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    const std::vector<Token> cue = model->tokenize(kCue, false, false);
    // The last of three passages is a short one.
    const std::vector<Token> tokens = some_tokens(*model, 2 * 150 + 66);
    const auto lessons = lessons_of(model, tokens, cue, 150, 150 / 8);
    const FilterBank found =
        calibrate_reconstruction(model, tokens, cue, options, {});
    for (std::size_t l = 0; l < lessons.size(); ++l) {
      for (std::size_t h = 0; h < lessons[l].size(); ++h) {
        SCOPED_TRACE(::testing::Message() << "layer " << l << " head " << h);
        const Lessons& lesson = lessons[l][h];
        const auto both = found.layer(l).head(h);
        const std::size_t size = both.size() / 2;
        expect_fitted(lesson.keys, lesson.facts, both.first(size));
        expect_fitted(lesson.keys, lesson.fluency, both.subspan(size));
      }
    }
  }
}

}  // namespace
}  // namespace qfilters::llama
