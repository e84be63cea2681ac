// Policy reconstruct in the engine, worked out from the definition: what second
// readings pay the stored rows, and which of them that leaves.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/policy.h"
#include "qfilters/sequence_cache.h"

#include "adapters/cut.h"
#include "adapters/models.h"
#include "adapters/plain_attention.h"
#include "llama/cue.h"
#include "llama/engine.h"
#include "policies/registry.h"

namespace qfilters::llama {
namespace {

using testing::attention_of;
using testing::Cut;
using testing::Heard;
using testing::listen;
using testing::load_tiny;
using testing::positions_of;
using testing::Row;
using testing::Rows;
using testing::some_tokens;

constexpr std::size_t kBudget = 40;
constexpr Protection kProtection = {2, 4};

class ReconstructTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_tiny(GetParam());
    if (model_ == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    tokens_ = some_tokens(*model_, 230);
  }

  [[nodiscard]] Policy policy(BudgetRule rule) const {
    PolicyOptions options;
    options.budget = kBudget;
    options.protection = kProtection;
    options.rule = rule;
    options.floor = 0;
    return policies::make("reconstruct", options);
  }

  // The micro-batches that read tokens [done, end) again.
  [[nodiscard]] std::vector<std::vector<Token>> second_reading(
      std::size_t done, std::size_t end, std::size_t chunk) const {
    const std::size_t room = chunk / 4;
    std::vector<Token> cue = model_->tokenize(kCue, false, false);
    if (cue.size() > room) cue.clear();
    std::vector<std::vector<Token>> parts;
    while (done < end) {
      std::vector<Token>& part = parts.emplace_back(cue);
      const std::size_t lead = std::min({std::size_t{8}, done, room});
      part.insert(part.end(), &tokens_[done - lead], &tokens_[done]);
      while (done < end && part.size() < chunk) {
        part.push_back(tokens_[done++]);
      }
    }
    return parts;
  }

  // Queries of the micro-batch `again` see the stored rows and, as far as they
  // come before them, each other.
  void pay(
      const SequenceCache& cache,
      const std::vector<Heard>& text,
      const std::vector<Heard>& again) {
    for_each_head([&](std::size_t l, std::size_t h) {
      const std::vector<std::size_t> stored = positions_of(cache, l, h);
      Rows keys;
      for (const std::size_t p : stored) {
        keys.push_back(text[l].keys[h][p]);
      }
      const Rows& own = again[l].keys[h];
      keys.insert(keys.end(), own.begin(), own.end());
      for (std::size_t s = 0; s < again[l].share(); ++s) {
        const Rows& queries = again[l].queries[h * again[l].share() + s];
        for (std::size_t t = 0; t < queries.size(); ++t) {
          const Row paid = attention_of(
              again[l],
              queries[t],
              std::span(keys).first(stored.size() + t + 1));
          for (std::size_t r = 0; r < stored.size(); ++r) {
            double& most = paid_[l][h][stored[r]];
            most = std::max(most, paid[r]);
          }
        }
      }
    });
  }

  // The rows that stay are those which were paid most.
  void evict_and_check(SequenceCache& cache, Engine& engine) const {
    std::vector<std::vector<std::size_t>> before;
    for_each_head([&](std::size_t l, std::size_t h) {
      before.push_back(positions_of(cache, l, h));
    });
    engine.evict(cache, std::span(tokens_).first(cache.offset()));
    std::vector<Cut> cuts;
    const bool shared = cache.policy().options().rule == BudgetRule::kShared;
    std::size_t heads = 0;
    for_each_head([&](std::size_t l, std::size_t h) {
      SCOPED_TRACE(::testing::Message() << "layer " << l << " head " << h);
      if (cuts.empty() || !shared) cuts.emplace_back();
      check_head(cache, l, h, before[heads++], cuts.back());
    });
    for (const Cut& cut : cuts) {
      cut.expect_best(kBudget * heads / cuts.size(), kRounding);
    }
  }

  // Reads the text, evicting twice.
  void read(BudgetRule rule, std::size_t chunk) {
    SessionOptions options;
    options.chunk = chunk;
    Engine engine(model_, options);
    SequenceCache cache(model_->layer_shapes(), policy(rule));
    std::vector<Heard> text;
    paid_.clear();
    for (const AttentionLayer& layer : model_->layers()) {
      paid_.emplace_back(layer.kv_heads, Row(tokens_.size()));
    }
    for (const std::size_t end : {std::size_t{170}, tokens_.size()}) {
      const std::size_t begin = cache.offset();
      listen(engine, text);
      while (cache.offset() < end) {
        const std::size_t count = std::min(chunk, end - cache.offset());
        engine.step(
            cache,
            std::span(tokens_).subspan(cache.offset(), count),
            Logits::kNone);
      }
      for (const auto& part : second_reading(begin, end, chunk)) {
        std::vector<Heard> again;
        listen(engine, again);
        engine.step(cache, part, Logits::kNone, Engine::Mode::kProbe);
        pay(cache, text, again);
      }
      engine.on_node({});
      evict_and_check(cache, engine);
    }
  }

  // Calls function(layer, head) for the heads of global layers.
  template <typename Function>
  void for_each_head(const Function& function) const {
    for (std::size_t l = 0; l < model_->layers().size(); ++l) {
      const AttentionLayer& layer = model_->layers()[l];
      for (std::size_t h = 0; layer.window == 0 && h < layer.kv_heads; ++h) {
        function(l, h);
      }
    }
  }

  // Scores of a head that held rows at `before`, and its part of a cut.
  void check_head(
      const SequenceCache& cache,
      std::size_t layer,
      std::size_t head,
      const std::vector<std::size_t>& before,
      Cut& cut) const {
    const Row& paid = paid_[layer][head];
    const std::vector<std::size_t> kept = positions_of(cache, layer, head);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      EXPECT_NEAR(
          cache.store(layer).scores(head)[i] / paid[kept[i]], 1, kRounding)
          << kept[i];
    }
    cut.add(before, kept, paid, kProtection);
  }

  static constexpr double kRounding = 1e-4;

  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
  std::vector<std::vector<Row>> paid_;  // [layer][head][token]: the most
};

TEST_P(ReconstructTest, KeepsTheRowsThatSecondReadingsAttendToMost) {
  // The cue takes a quarter of a micro-batch at most.
  const std::size_t roomy = 4 * model_->tokenize(kCue, false, false).size();
  for (const BudgetRule rule : {BudgetRule::kUniform, BudgetRule::kShared}) {
    for (const std::size_t chunk : {std::size_t{24}, roomy - 1, roomy}) {
      SCOPED_TRACE(::testing::Message() << to_string(rule) << ' ' << chunk);
      read(rule, chunk);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    ReconstructTest,
    ::testing::Values("llama_ok", "gemma_swa", "softcap"));

}  // namespace
}  // namespace qfilters::llama
