#pragma once

// Caches whose heads are scored anew, and slow direct computations.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"

#include "unit/sequence_fixture.h"
#include "unit/test_util.h"

namespace qfilters::test {

/// Keys of a group of the view, row by row.
inline std::vector<std::vector<float>> keys_of(
    const RowsView& rows, std::size_t group) {
  std::vector<std::vector<float>> out;
  std::vector<std::uint16_t> key(rows.shape().key_dim);
  for (std::size_t r = 0; r < rows.rows(group); ++r) {
    rows.read_key(group, r, key.data());
    auto& row = out.emplace_back();
    for (const std::uint16_t x : key)
      row.push_back(decode(rows.shape().dtype, x));
  }
  return out;
}

/// Minus the cosine of each key with the mean of the unit keys.
inline std::vector<double> keydiff_of(
    const std::vector<std::vector<float>>& keys) {
  std::vector<double> anchor(keys.front().size());
  std::vector<std::vector<double>> units;
  for (const auto& key : keys) {
    double norm = 0;
    for (const float x : key)
      norm += double{x} * x;
    auto& unit = units.emplace_back(key.begin(), key.end());
    for (std::size_t d = 0; d < unit.size(); ++d) {
      unit[d] = norm == 0 ? 0 : unit[d] / std::sqrt(norm);
      anchor[d] += unit[d];
    }
  }
  double norm = 0;
  for (const double a : anchor)
    norm += a * a;
  std::vector<double> scores;
  for (const auto& unit : units) {
    double dot = 0;
    for (std::size_t d = 0; d < unit.size(); ++d)
      dot += unit[d] * anchor[d];
    scores.push_back(norm == 0 ? 0 : -dot / std::sqrt(norm));
  }
  return scores;
}

/// Caches with `stored` rows (evicted among more) and `fresh` new ones.
class RescoreTest : public ::testing::Test {
 protected:
  template <typename Check>
  void for_each_cache(const Check& check) {
    for (const RowFormat format : {RowFormat::kSame, RowFormat::kInt8}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (const std::size_t dim : {1U, 17U, 64U})
          for_each_count(Model({{2, dim, 8, 0}}, 2, dtype), format, check);
      }
    }
  }

  template <typename Check>
  void for_each_count(
      const Model& model, RowFormat format, const Check& check) {
    model_ = &model;
    SequenceOptions options = model.options();
    options.format = format;
    for (const std::size_t stored : {0U, 40U, 64U, 100U}) {
      for (const std::size_t fresh : {1U, 30U, 64U}) {
        SequenceCache cache(
            model.layers,
            Policy::make(
                "random", budget(std::max(stored, std::size_t{1}), 0, 0)),
            options);
        if (stored > 0) model.feed(cache, {stored + 20});
        model.append(cache, fresh);
        SCOPED_TRACE(
            std::string(to_string(format)) + " rows, " +
            to_string(model.dtype) + " dim " +
            std::to_string(model.layers[0].key_dim) + " stored " +
            std::to_string(stored) + " new " + std::to_string(fresh));
        for (std::size_t g = 0; g < 4; ++g)
          check(cache.rows(0), g);
      }
    }
  }

  static std::vector<float> rescored(
      const Scorer& scorer, const RowsView& rows, std::size_t group) {
    std::vector<float> scores(rows.rows(group), kNaN);
    scorer.rescore({0, group / 2, group % 2, rows}, scores);
    return scores;
  }

  const Model* model_ = nullptr;  ///< of the cache that is checked
};

}  // namespace qfilters::test
