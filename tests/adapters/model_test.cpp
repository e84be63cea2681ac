#include "llama/model.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <llama.h>

#include "qfilters/error.h"

#include "adapters/models.h"

namespace qfilters::llama {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::load_tiny;
using testing::RealModelTest;
using testing::tiny_models;

using ModelRealTest = RealModelTest;

TEST_F(ModelRealTest, KnowsWhatItsAttentionLooksLike) {
  EXPECT_EQ(model_->architecture(), "llama");
  EXPECT_FALSE(model_->name().empty());
  EXPECT_EQ(model_->vocabulary(), 49152U);
  EXPECT_EQ(model_->trained_length(), 8192U);
  EXPECT_GT(model_->file_bytes(), 100'000'000U);
  ASSERT_EQ(model_->layers().size(), 30U);
  for (std::size_t l = 0; l < 30; ++l) {
    const AttentionLayer& layer = model_->layers()[l];
    EXPECT_EQ(layer.index, static_cast<int>(l));
    EXPECT_EQ(layer.query_heads, 9U);
    EXPECT_EQ(layer.kv_heads, 3U);
    EXPECT_EQ(layer.key_dim, 64U);
    EXPECT_EQ(layer.value_dim, 64U);
    EXPECT_EQ(layer.window, 0U);
    EXPECT_EQ(layer.scale, 0.125F);
    EXPECT_EQ(layer.soft_cap, 0.0F);
  }
  EXPECT_EQ(model_->layer_shapes()[29], (LayerShape{3, 64, 64, 0}));
  EXPECT_EQ(model_->query_shapes()[29], (QueryShape{9, 3, 64}));
}

TEST_F(ModelRealTest, TurnsTextIntoTokensAndBack) {
  const std::string text = "Grüße, caches! 3.14\n";
  std::string again;
  for (const Token token : model_->tokenize(text, false, false)) {
    again += model_->piece(token);
  }
  EXPECT_EQ(again, text);
  EXPECT_TRUE(model_->tokenize("", false, false).empty());
}

TEST_F(ModelRealTest, ReadsControlTokensOnlyWhenAsked) {
  const std::vector<Token> special =
      model_->tokenize("<|im_end|>", false, true);
  ASSERT_EQ(special.size(), 1U);
  EXPECT_TRUE(model_->is_end(special.front()));
  EXPECT_EQ(model_->piece(special.front()), "") << "nothing to show";
  EXPECT_GT(model_->tokenize("<|im_end|>", false, false).size(), 1U);
}

TEST_F(ModelRealTest, RefusesTokensOutsideTheVocabulary) {
  for (const Token token : {-1, 49152}) {
    EXPECT_EQ(
        error_of([&] { (void)model_->piece(token); }).kind(),
        ErrorKind::kInvalidArgument);
    EXPECT_EQ(
        error_of([&] { (void)model_->is_end(token); }).kind(),
        ErrorKind::kInvalidArgument);
  }
}

TEST_F(ModelRealTest, WritesTheModelsOwnChatPrompt) {
  const std::vector<Model::ChatMessage> messages = {
      {"system", "Be brief."}, {"user", std::string(3000, 'x')}};
  const std::string prompt = model_->chat_prompt(messages, true);
  EXPECT_THAT(prompt, HasSubstr("<|im_start|>system\nBe brief.<|im_end|>\n"));
  EXPECT_THAT(prompt, HasSubstr(std::string(3000, 'x') + "<|im_end|>\n"));
  EXPECT_TRUE(prompt.ends_with("<|im_start|>assistant\n"));
}

TEST_F(ModelRealTest, HearsLlamaCppInsteadOfTheTerminal) {
  std::vector<std::string> lines;
  set_log_handler(
      [&](int, std::string_view line) { lines.emplace_back(line); });
  ::testing::internal::CaptureStderr();
  (void)Model::load(testing::asset("smollm2-135m-instruct-q8_0.gguf"));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  set_log_handler(nullptr);
  EXPECT_GT(lines.size(), 10U);
  EXPECT_THAT(lines, ::testing::Each(::testing::Not(HasSubstr("\n"))));
}

class ModelTinyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = tiny_models();
    if (folder_.empty()) GTEST_SKIP() << "no Python to write tiny models";
  }

  // A file of this test's own.
  static std::filesystem::path write(
      const std::string& name, const std::string& content) {
    std::filesystem::path path =
        std::filesystem::path(::testing::TempDir()) / (name + ".gguf");
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

  static void expect_damaged(const std::filesystem::path& path) {
    const Error error = error_of([&] { (void)Model::load(path); });
    EXPECT_EQ(error.kind(), ErrorKind::kFile) << error.what();
    const std::string message = error.what();
    EXPECT_THAT(message, HasSubstr(path.string()));
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 0) << message;
  }

  std::filesystem::path folder_;
};

TEST_F(ModelTinyTest, FindsWindowedLayers) {
  const auto model = load_tiny("gemma_swa");
  std::vector<std::size_t> windows;
  for (const AttentionLayer& layer : model->layers()) {
    windows.push_back(layer.window);
  }
  EXPECT_EQ(windows, (std::vector<std::size_t>{32, 0, 32, 0}));
}

TEST_F(ModelTinyTest, FindsTheSoftCap) {
  EXPECT_EQ(load_tiny("softcap")->layers().front().soft_cap, 50.0F);
}

TEST_F(ModelTinyTest, FingerprintTellsModelsApartButNotQuantisations) {
  const auto path = folder_ / "llama_ok.gguf";
  const auto quantised = write("quantised", "");
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_MOSTLY_Q8_0;
  params.nthread = 1;
  ASSERT_EQ(llama_model_quantize(path.c_str(), quantised.c_str(), &params), 0U);
  const auto model = Model::load(path);
  const auto smaller = Model::load(quantised);
  EXPECT_LT(smaller->file_bytes(), model->file_bytes());
  EXPECT_EQ(model->fingerprint().size(), 16U);
  EXPECT_EQ(model->fingerprint(), smaller->fingerprint());
  EXPECT_NE(model->fingerprint(), load_tiny("gemma_swa")->fingerprint());
}

TEST_F(ModelTinyTest, AddsTheFirstTokenOnce) {
  const auto model = load_tiny("llama_ok");
  const std::vector<Token> tokens = model->tokenize("a", true, true);
  ASSERT_EQ(tokens.front(), 1);
  EXPECT_EQ(model->tokenize("<s>a", true, true).front(), 1);
  EXPECT_NE(model->tokenize("<s>a", true, true)[1], 1);
  EXPECT_NE(model->tokenize("a", false, true).front(), 1);
}

TEST_F(ModelTinyTest, SaysWhenThereIsNoChatTemplate) {
  const auto model = load_tiny("llama_ok");
  const Error error = error_of([&] { (void)model->chat_prompt({}, true); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("llama_ok"));
}

TEST_F(ModelTinyTest, RefusesGpuLayersInOneSentence) {
  ModelOptions options;
  options.gpu_layers = 99;
  const Error error =
      error_of([&] { (void)Model::load(folder_ / "llama_ok.gguf", options); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("gpu_layers=99"));
  EXPECT_THAT(error.what(), HasSubstr("state rewriting"));
}

TEST_F(ModelTinyTest, RefusesFilesThatAreNoModel) {
  expect_damaged("/no/such/model.gguf");
  expect_damaged(folder_);
  expect_damaged(write("empty", ""));
  expect_damaged(write("short", "GG"));
  expect_damaged(write("text", "Once upon a time there was a cache."));
  expect_damaged(write("magic", "GGUF"));
}

TEST_F(ModelTinyTest, RefusesTruncatedFilesOfEveryLength) {
  const std::string whole = testing::read_file(folder_ / "llama_ok.gguf");
  for (std::size_t size = 5; size < whole.size(); size += size / 3 + 1) {
    SCOPED_TRACE(size);
    expect_damaged(write("truncated", whole.substr(0, size)));
  }
  expect_damaged(write("truncated", whole.substr(0, whole.size() - 1)));
}

TEST_F(ModelTinyTest, RefusesNoiseBehindTheMagic) {
  std::uint32_t state = 1;
  for (const std::size_t size : {4, 20, 100, 5000}) {
    for (const std::string start : {"GGUF", "GGUF\3\0\0\0"}) {
      SCOPED_TRACE(size);
      std::string noise = start;
      while (noise.size() < size) {
        state = state * 1664525U + 1013904223U;
        noise += static_cast<char>(state >> 24);
      }
      expect_damaged(write("noise", noise));
    }
  }
}

TEST_F(ModelTinyTest, RefusesNumbersThatLlamaCppWouldAbortOn) {
  const std::string whole = testing::read_file(folder_ / "llama_ok.gguf");
  const std::string key = "llama.block_count";
  const std::size_t value = whole.find(key) + key.size() + 4;
  std::string damaged = whole;
  damaged.replace(value, 4, "\xff\xff\xff\x7f");
  expect_damaged(write("blocks", damaged));
}

struct RefusalCase {
  const char* model;
  const char* reason;
};

class ModelRefusalTest : public ::testing::TestWithParam<RefusalCase> {};

TEST_P(ModelRefusalTest, SaysInOneLineWhyTheModelCannotBeServed) {
  const std::filesystem::path folder = tiny_models();
  if (folder.empty()) GTEST_SKIP() << "no Python to write tiny models";
  const auto path = folder / (std::string(GetParam().model) + ".gguf");
  const Error error = error_of([&] { (void)Model::load(path); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  const std::string message = error.what();
  EXPECT_THAT(message, HasSubstr(path.string()));
  EXPECT_THAT(message, HasSubstr(GetParam().reason));
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Each,
    ModelRefusalTest,
    ::testing::Values(
        RefusalCase{"alibi", "ALiBi"},
        RefusalCase{"bert", "no KV cache"},
        RefusalCase{"chunked", "standard sliding window"},
        RefusalCase{"hybrid", "hybrid"},
        RefusalCase{"longrope", "RoPE factors"},
        RefusalCase{"mamba", "recurrent"},
        RefusalCase{"mla", "MLA"},
        RefusalCase{"mrope", "M-RoPE"},
        RefusalCase{"shared_kv", "shared by several layers"},
        RefusalCase{"sinks", "attention sinks"}),
    [](const auto& test) { return std::string(test.param.model); });

}  // namespace
}  // namespace qfilters::llama
