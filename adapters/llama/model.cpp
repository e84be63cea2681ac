#include "llama/model.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <utility>

#include <llama.h>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"

#include "llama/gguf_facts.h"
#include "llama/probe.h"
#include "llama/runtime.h"

namespace qfilters::llama {
namespace {

[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorKind::kUnsupported, reason);
}

void check_facts(const GgufFacts& facts) {
  if (facts.context_dependent_rope) {
    refuse(
        "its RoPE factors depend on the length of llama.cpp's context "
        "(longrope), which is one micro-batch here");
  }
  if (facts.latent_attention) {
    refuse("multi-head latent attention (MLA) keeps no rows per head");
  }
}

void check_kind(const llama_model& model) {
  if (llama_model_is_recurrent(&model)) {
    refuse("recurrent models have no KV cache");
  }
  if (llama_model_is_hybrid(&model)) {
    refuse("hybrid models keep a recurrent state beside their KV cache");
  }
  if (llama_model_has_encoder(&model)) refuse("it has an encoder");
  if (!llama_model_has_decoder(&model)) refuse("it has no decoder");
  if (llama_model_is_diffusion(&model)) {
    refuse("diffusion models do not attend causally");
  }
  switch (llama_model_rope_type(&model)) {
    case LLAMA_ROPE_TYPE_MROPE:
    case LLAMA_ROPE_TYPE_IMROPE:
    case LLAMA_ROPE_TYPE_VISION:
      refuse("its positions have several components (M-RoPE)");
    default:
      break;
  }
}

// Nothing here depends on how the weights are quantised.
std::string fingerprint_of(
    const llama_model& model,
    const GgufFacts& facts,
    std::span<const AttentionLayer> layers) {
  const auto rope_scale =
      static_cast<double>(llama_model_rope_freq_scale_train(&model));
  Fingerprint result;
  for (const std::string& text : {facts.architecture, facts.name}) {
    result.add(text);
    result.add('\n');
  }
  result.add(llama_model_n_layer(&model));
  result.add(llama_model_n_embd(&model));
  result.add(llama_vocab_n_tokens(llama_model_get_vocab(&model)));
  result.add(std::bit_cast<std::uint64_t>(facts.rope.freq_base));
  result.add(std::bit_cast<std::uint64_t>(rope_scale));
  for (const AttentionLayer& layer : layers) {
    result.add(layer.index);
    for (const std::size_t value :
         {layer.query_heads,
          layer.kv_heads,
          layer.key_dim,
          layer.value_dim,
          layer.window}) {
      result.add(std::uint64_t{value});
    }
  }
  return result.hex();
}

std::string file_fingerprint_of(
    const std::filesystem::path& path, std::uint64_t bytes) {
  constexpr std::uint64_t kBlocks = 64;
  constexpr std::uint64_t kBlockBytes = 4096;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> block(std::min(bytes, kBlockBytes));
  Fingerprint result;
  result.add(bytes);
  for (std::uint64_t i = 0; i < kBlocks; ++i) {  // the first to the last
    const std::uint64_t at = (bytes - block.size()) / (kBlocks - 1) * i;
    file.seekg(static_cast<std::streamoff>(at));
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    result.add(std::string_view(block.data(), block.size()));
  }
  if (!file) throw Error(ErrorKind::kFile, "it cannot be read again");
  return result.hex();
}

}  // namespace

Model::~Model() = default;

void Model::load_weights(
    const std::filesystem::path& path, const ModelOptions& options) {
  const GgufFacts facts = read_gguf_facts(path);
  architecture_ = facts.architecture;
  name_ = facts.name.empty() ? path.stem().string() : facts.name;
  rope_ = facts.rope;
  check_facts(facts);

  llama_model_params params = llama_model_default_params();
  // An empty list, or llama.cpp would take every device it finds.
  ggml_backend_dev_t no_devices = nullptr;
  params.devices = &no_devices;
  params.n_gpu_layers = 0;
  clear_log_errors();
  model_.reset(llama_model_load_from_file(path.string().c_str(), params));
  if (model_ == nullptr) {
    throw Error(ErrorKind::kFile, log_error("llama.cpp gave no reason"));
  }
  check_kind(*model_);
  layers_ = probe_layers(*model_, options.threads);
  fingerprint_ = fingerprint_of(*model_, facts, layers_);
  vocabulary_ = static_cast<std::size_t>(
      llama_vocab_n_tokens(llama_model_get_vocab(model_.get())));
  trained_length_ = static_cast<std::size_t>(
      std::max(llama_model_n_ctx_train(model_.get()), 0));
  std::error_code code;
  const std::uintmax_t bytes = std::filesystem::file_size(path, code);
  if (code) throw Error(ErrorKind::kFile, code.message());
  file_bytes_ = bytes;
  file_fingerprint_ = file_fingerprint_of(path, bytes);
}

std::shared_ptr<const Model> Model::load(
    const std::filesystem::path& path, const ModelOptions& options) {
  if (options.gpu_layers != 0) {
    refuse(
        "Model::load: " + path.string() +
        ": gpu_layers=" + std::to_string(options.gpu_layers) +
        ": a GPU-offloaded model needs state rewriting, which this version "
        "does not have; run it on the CPU");
  }
  SessionOptions checked;
  checked.threads = options.threads;
  check_options("Model::load", checked);
  const std::shared_ptr<Model> model(new Model);
  const LoadingScope scope;
  try {
    model->load_weights(path, options);
  } catch (const Error& error) {
    std::string message = "Model::load: " + path.string();
    if (!model->name_.empty()) message += " (" + model->name_ + ")";
    message += std::string(": ") + error.what();
    // A damaged file can put anything into its name.
    std::ranges::replace_if(
        message, [](unsigned char c) { return c < ' '; }, ' ');
    throw Error(error.kind(), message);
  }
  return model;
}

std::vector<LayerShape> Model::layer_shapes() const {
  std::vector<LayerShape> shapes;
  shapes.reserve(layers_.size());
  for (const AttentionLayer& layer : layers_) {
    shapes.push_back(
        {layer.kv_heads, layer.key_dim, layer.value_dim, layer.window});
  }
  return shapes;
}

std::vector<QueryShape> Model::query_shapes() const {
  std::vector<QueryShape> shapes;
  shapes.reserve(layers_.size());
  for (const AttentionLayer& layer : layers_) {
    shapes.push_back({layer.query_heads, layer.kv_heads, layer.key_dim});
  }
  return shapes;
}

std::vector<Token> Model::tokenize(
    std::string_view text, bool bos, bool special) const {
  constexpr std::size_t kMaxBytes = std::numeric_limits<std::int32_t>::max();
  const llama_vocab* vocab = llama_model_get_vocab(model_.get());
  if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
    refuse("Model::tokenize: " + name_ + " has no tokenizer");
  }
  if (text.size() > kMaxBytes) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "Model::tokenize: " + std::to_string(text.size()) + " bytes exceed " +
            std::to_string(kMaxBytes));
  }
  const auto run = [&](std::vector<Token>& tokens) {
    // add_special could also append an end token, which no prompt wants.
    try {
      return llama_tokenize(
          vocab,
          text.data(),
          static_cast<std::int32_t>(text.size()),
          tokens.data(),
          static_cast<std::int32_t>(tokens.size()),
          /*add_special=*/false,
          special);
    } catch (const std::out_of_range&) {  // a byte that no token stands for
      refuse("Model::tokenize: the vocabulary of " + name_ + " is damaged");
    }
  };
  std::vector<Token> tokens(text.size() / 3 + 16);
  std::int32_t count = run(tokens);
  if (count < 0 && count != std::numeric_limits<std::int32_t>::min()) {
    tokens.resize(static_cast<std::size_t>(-count));
    count = run(tokens);
  }
  if (count < 0) {
    throw Error(ErrorKind::kRuntime, "Model::tokenize: the text is too long");
  }
  tokens.resize(static_cast<std::size_t>(count));
  const Token first = llama_vocab_bos(vocab);
  if (bos && llama_vocab_get_add_bos(vocab) && first != LLAMA_TOKEN_NULL &&
      (tokens.empty() || tokens.front() != first)) {
    tokens.insert(tokens.begin(), first);
  }
  return tokens;
}

void Model::check_token(std::string_view operation, Token token) const {
  if (token >= 0 && static_cast<std::size_t>(token) < vocabulary_) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      std::string(operation) + ": token " + std::to_string(token) +
          " is outside the vocabulary of " + std::to_string(vocabulary_));
}

std::string Model::piece(Token token) const {
  check_token("Model::piece", token);
  const llama_vocab* vocab = llama_model_get_vocab(model_.get());
  std::string text(32, '\0');
  const auto run = [&] {
    return llama_token_to_piece(
        vocab,
        token,
        text.data(),
        static_cast<std::int32_t>(text.size()),
        /*lstrip=*/0,
        /*special=*/false);
  };
  std::int32_t length = run();
  if (length < 0) {
    text.resize(static_cast<std::size_t>(-length));
    length = run();
  }
  text.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return text;
}

bool Model::is_end(Token token) const {
  check_token("Model::is_end", token);
  return llama_vocab_is_eog(llama_model_get_vocab(model_.get()), token);
}

std::string Model::chat_prompt(
    std::span<const ChatMessage> messages, bool open_answer) const {
  const char* chat_template = llama_model_chat_template(model_.get(), nullptr);
  if (chat_template == nullptr) {
    refuse("Model::chat_prompt: " + name_ + " has no chat template");
  }
  std::vector<llama_chat_message> chat;
  chat.reserve(messages.size());
  std::size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += 2 * (message.role.size() + message.content.size());
  }
  std::string text(bytes, '\0');
  const auto run = [&] {
    return llama_chat_apply_template(
        chat_template,
        chat.data(),
        chat.size(),
        open_answer,
        text.data(),
        static_cast<std::int32_t>(text.size()));
  };
  std::int32_t length = run();
  if (length > 0 && static_cast<std::size_t>(length) > text.size()) {
    text.resize(static_cast<std::size_t>(length));
    length = run();
  }
  if (length < 0) {
    refuse(
        "Model::chat_prompt: llama.cpp does not know the chat template of " +
        name_);
  }
  text.resize(static_cast<std::size_t>(length));
  return text;
}

}  // namespace qfilters::llama
