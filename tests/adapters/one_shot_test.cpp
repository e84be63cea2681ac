#include "eval/tasks/one_shot.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "qfilters/policy.h"
#include "qfilters/scoring.h"
#include "qfilters/sequence_cache.h"
#include "qfilters/snapshot.h"

#include "adapters/cut.h"
#include "adapters/models.h"
#include "adapters/plain_attention.h"
#include "llama/engine.h"

namespace qfilters::eval {
namespace {

using llama::Engine;
using llama::Logits;
using llama::testing::attention_of;
using llama::testing::Cut;
using llama::testing::dot;
using llama::testing::hear_text;
using llama::testing::Heard;
using llama::testing::load_tiny;
using llama::testing::log_probability;
using llama::testing::positions_of;
using llama::testing::Row;
using llama::testing::some_tokens;

constexpr std::size_t kTokens = 150;
constexpr std::size_t kBudget = 40;
constexpr std::size_t kChunk = 24;
constexpr Protection kProtection = {2, 4};

// [layer][head] of a cache.
using Positions = std::vector<std::vector<std::vector<std::size_t>>>;

// Ranks the rows at some positions above all others.
class ChosenScorer final : public Scorer {
 public:
  explicit ChosenScorer(Positions chosen) : chosen_(std::move(chosen)) {}

  [[nodiscard]] std::string_view name() const noexcept override {
    return "chosen";
  }

  void score(const ScoreInput& in, std::span<float> out) const override {
    const auto& chosen = chosen_[in.layer][in.kv_head];
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto p = static_cast<std::size_t>(in.first_position) + i;
      out[i] = std::ranges::binary_search(chosen, p) ? 1.0F : 0.0F;
    }
  }

 private:
  Positions chosen_;
};

// What a row is worth to a policy, by the table in docs/policies.md.
Row worth_of(const std::string& policy, const Heard& layer, std::size_t head) {
  Row worth(kTokens);
  if (policy == "knorm") {
    for (std::size_t t = 0; t < kTokens; ++t) {
      worth[t] = -std::sqrt(dot(layer.keys[head][t], layer.keys[head][t]));
    }
    return worth;
  }
  const bool all_heads = policy == "tova";
  for (std::size_t q = 0; q < layer.queries.size(); ++q) {
    const std::size_t h = q / layer.share();
    if (h != head && !all_heads) continue;
    const std::size_t first = policy == "h2o" ? 0 : kTokens - 1;
    for (std::size_t t = first; t < kTokens; ++t) {
      const Row paid = attention_of(
          layer, layer.queries[q][t], std::span(layer.keys[h]).first(t + 1));
      for (std::size_t r = 0; r <= t; ++r) {
        worth[r] += paid[r];
      }
    }
  }
  return worth;
}

class OneShotTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_tiny(GetParam());
    if (model_ == nullptr) GTEST_SKIP() << "no Python to write tiny models";
    codec_ = make_codec(model_);
    context_ = some_tokens(*model_, kTokens);
    inquiries_ = {
        inquiry("What does the fox do?", " It jumps."),
        inquiry("Who is lazy?", " The dog")};
  }

  [[nodiscard]] Inquiry inquiry(
      const std::string& question, const std::string& answer) const {
    Inquiry out = make_inquiry(codec_, question, answer);
    out.references = {answer};
    out.generate = 5;
    return out;
  }

  [[nodiscard]] static Contender contender(
      const std::string& policy, const std::string& budget = "40") {
    RunSpec spec;
    spec.policy = policy;
    spec.budget = parse_budget(budget);
    spec.sinks = kProtection.sinks;
    spec.recent = kProtection.recent;
    spec.chunk = kChunk;
    spec.protocol = "one-shot";
    return {spec, nullptr};
  }

  // What a contender keeps of the context.
  [[nodiscard]] Positions kept_by(const Contender& contender) const {
    Usage usage;
    OneShotContext all(model_, {&contender, 1}, context_, kTokens + 100);
    SequenceCache cache(model_->layer_shapes(), Policy::full());
    cache.restore(all.open(0, usage)->save());
    Positions out;
    for (std::size_t l = 0; l < cache.layers(); ++l) {
      auto& heads = out.emplace_back();
      for (std::size_t h = 0; h < cache.layer_shape(l).kv_heads; ++h) {
        heads.push_back(positions_of(cache, l, h));
      }
    }
    return out;
  }

  // The context in a full cache, of which all but the rows `kept` then goes.
  [[nodiscard]] std::unique_ptr<SequenceCache> cut(
      Engine& engine, const Positions& kept) const {
    auto cache =
        std::make_unique<SequenceCache>(model_->layer_shapes(), Policy::full());
    (void)read(engine, *cache, context_);
    PolicyOptions options;
    options.budget = kBudget;
    options.protection = {0, 0};
    options.rule = BudgetRule::kShared;
    options.floor = 0;
    cache->set_policy(
        Policy::custom(std::make_shared<ChosenScorer>(kept), options));
    cache->evict();
    cache->set_policy(Policy::full());
    return cache;
  }

  // Logits of the last of some tokens.
  static const float* read(
      Engine& engine, SequenceCache& cache, std::span<const Token> tokens) {
    for (std::size_t i = 0; i < tokens.size(); i += kChunk) {
      const std::size_t count = std::min(kChunk, tokens.size() - i);
      engine.step(cache, tokens.subspan(i, count), Logits::kLast);
    }
    return engine.logits((tokens.size() - 1) % kChunk);
  }

  // The loss of the answer, one token after another, then the greedy one.
  [[nodiscard]] Reply answer(
      Engine& engine, SequenceCache& cache, const Inquiry& inquiry) const {
    const std::size_t size = model_->vocabulary();
    const Snapshot context = cache.save();
    Reply reply;
    const float* logits = read(engine, cache, inquiry.question);
    reply.kept = cache.stats().rows_mean / static_cast<double>(cache.offset());
    for (const Token token : inquiry.answer) {
      reply.nll_per_token -= log_probability(logits, size, token) /
                             static_cast<double>(inquiry.answer.size());
      logits = read(engine, cache, {&token, 1});
    }
    cache.restore(context);
    logits = read(engine, cache, inquiry.question);
    for (std::size_t i = 0; i < inquiry.generate; ++i) {
      const auto token =
          static_cast<Token>(std::max_element(logits, logits + size) - logits);
      if (codec_.is_end(token)) break;
      reply.prediction += codec_.piece(token);
      logits = read(engine, cache, {&token, 1});
    }
    cache.restore(context);
    return reply;
  }

  // What each contender replies to each inquiry.
  [[nodiscard]] std::vector<std::vector<Reply>> ask(
      std::span<const Contender> contenders) const {
    std::vector<std::vector<Reply>> replies(contenders.size());
    OneShotReaders readers(model_, contenders, codec_);
    readers.read(
        context_, kTokens + 100, [&](std::size_t reader, Reading& reading) {
          for (const Inquiry& inquiry : inquiries_) {
            replies[reader].push_back(reading.ask(inquiry));
          }
        });
    return replies;
  }

  std::shared_ptr<const llama::Model> model_;
  Codec codec_;
  std::vector<Token> context_;
  std::vector<Inquiry> inquiries_;
};

TEST_P(OneShotTest, KeepsTheRowsThatAreWorthMost) {
  const std::vector<Heard> heard = hear_text(model_, context_, kChunk);
  std::vector<std::size_t> before(kTokens);
  std::iota(before.begin(), before.end(), std::size_t{0});
  for (const char* const policy : {"knorm", "h2o", "tova"}) {
    const Positions kept = kept_by(contender(policy));
    for (std::size_t l = 0; l < heard.size(); ++l) {
      if (model_->layers()[l].window != 0) continue;
      for (std::size_t h = 0; h < kept[l].size(); ++h) {
        SCOPED_TRACE(::testing::Message() << policy << ' ' << l << ' ' << h);
        Cut cut;
        const Row worth = worth_of(policy, heard[l], h);
        cut.add(before, kept[l][h], worth, kProtection);
        cut.expect_best(kBudget, 1e-5);
      }
    }
  }
}

TEST_P(OneShotTest, AnswersFromTheRowsThatAreLeftOfTheFullCache) {
  llama::SessionOptions options;
  options.chunk = kChunk;
  Engine engine(model_, options);
  const std::vector contenders = {
      contender("knorm"), contender("snapkv"), contender("reconstruct")};
  const auto replies = ask(contenders);
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    const auto cache = cut(engine, kept_by(contenders[c]));
    for (std::size_t i = 0; i < inquiries_.size(); ++i) {
      SCOPED_TRACE(contenders[c].spec.policy + inquiries_[i].references[0]);
      const Reply want = answer(engine, *cache, inquiries_[i]);
      EXPECT_NEAR(replies[c][i].nll_per_token, want.nll_per_token, 1e-6);
      EXPECT_EQ(replies[c][i].prediction, want.prediction);
      EXPECT_EQ(replies[c][i].kept, want.kept);
    }
  }
}

TEST_P(OneShotTest, NoContenderKnowsOfTheOthers) {
  std::vector contenders = {
      contender("snapkv"),
      contender("full"),
      contender("h2o"),
      contender("llama"),
      contender("knorm"),
      contender("knorm", "25"),
      contender("knorm"),
      contender("reconstruct"),
      contender("snapkv", "70")};
  contenders[6].spec.cache_type = "int8";
  const auto together = ask(contenders);
  std::vector reversed(contenders.rbegin(), contenders.rend());
  auto backwards = ask(reversed);
  std::reverse(backwards.begin(), backwards.end());
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    const auto alone = ask(std::span(contenders).subspan(c, 1));
    for (std::size_t i = 0; i < inquiries_.size(); ++i) {
      const Reply& want = alone[0][i];
      for (const Reply& got : {together[c][i], backwards[c][i]}) {
        EXPECT_EQ(got.nll_per_token, want.nll_per_token) << c;
        EXPECT_EQ(got.prediction, want.prediction) << c;
        EXPECT_EQ(got.kept, want.kept) << c;
      }
      for (std::size_t other = 0; other < c; ++other) {
        EXPECT_NE(together[other][i].nll_per_token, want.nll_per_token)
            << other << ' ' << c;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Each, OneShotTest, ::testing::Values("llama_ok", "gemma_swa", "softcap"));

}  // namespace
}  // namespace qfilters::eval
