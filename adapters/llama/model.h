#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qfilters/calibrator.h"
#include "qfilters/sequence_cache.h"

#include "llama/gguf_facts.h"
#include "llama/handles.h"

namespace qfilters::llama {

using Token = std::int32_t;

/// One attention layer as its attention node shows it.
struct AttentionLayer {
  int index = 0;  ///< layer number in the model
  std::size_t query_heads = 0;
  std::size_t kv_heads = 0;
  std::size_t key_dim = 0;
  std::size_t value_dim = 0;
  std::size_t window = 0;  ///< 0: global
  float scale = 0;
  float soft_cap = 0;
};

/// Where llama.cpp's log goes, line by line; level as ggml_log_level. Default:
/// errors are kept and shown only as the reason of an Error. The handler may
/// be called from any thread that uses llama.cpp.
using LogHandler = std::function<void(int level, std::string_view line)>;
void set_log_handler(LogHandler handler);

/// Called when llama.cpp gives up on itself (a damaged model can do that): it
/// must report and end the process; if it returns, the process aborts.
/// `loading`: within Model::load. Default: none. Called on any thread.
using AbortHandler = void (*)(std::string_view reason, bool loading);
void set_abort_handler(AbortHandler handler) noexcept;

struct ModelOptions {
  int threads = 1;
  int gpu_layers = 0;  ///< anything else is refused: see Model::load
};

/// A GGUF model: weights, vocabulary and what its attention looks like.
/// Immutable after load; engines share it.
class Model {
 public:
  /// Loads a model and makes sure that the engine can serve it. Throws Error
  /// kFile for a missing or damaged file, kUnsupported in one line that says
  /// why: GPU offload, recurrent or hybrid memory, encoder, diffusion,
  /// M-RoPE, MLA, ALiBi, attention sinks, context-dependent RoPE factors,
  /// windows other than the standard one, layers sharing a cache.
  static std::shared_ptr<const Model> load(
      const std::filesystem::path& path, const ModelOptions& options = {});

  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  [[nodiscard]] const std::string& architecture() const noexcept {
    return architecture_;
  }

  /// Identity of the weights' geometry, the same for every quantisation of
  /// one model: FNV-1a 64, hex, over architecture, name, shapes and RoPE.
  [[nodiscard]] const std::string& fingerprint() const noexcept {
    return fingerprint_;
  }

  /// Identity of the very weights: FNV-1a 64, hex, over the size of the file
  /// (of its first part, if it is split) and blocks spread over it. Tells
  /// quantisations and fine-tunes apart without reading all of it.
  [[nodiscard]] const std::string& file_fingerprint() const noexcept {
    return file_fingerprint_;
  }

  [[nodiscard]] const RopeFacts& rope() const noexcept { return rope_; }

  /// Attention layers in order; layers without attention are not listed.
  [[nodiscard]] std::span<const AttentionLayer> layers() const noexcept {
    return layers_;
  }

  [[nodiscard]] std::vector<LayerShape> layer_shapes() const;
  [[nodiscard]] std::vector<QueryShape> query_shapes() const;

  [[nodiscard]] std::size_t vocabulary() const noexcept { return vocabulary_; }

  [[nodiscard]] std::size_t trained_length() const noexcept {
    return trained_length_;
  }

  /// Size of the file (of its first part, if it is split).
  [[nodiscard]] std::uint64_t file_bytes() const noexcept {
    return file_bytes_;
  }

  /// Text to tokens. `special` also turns control tokens written out in the
  /// text into their ids; `bos` adds what the model wants in front, unless the
  /// text has it already. Throws Error kUnsupported for a model without a
  /// tokenizer.
  [[nodiscard]] std::vector<Token> tokenize(
      std::string_view text, bool bos, bool special) const;
  /// The bytes of a token, which need not be whole characters; nothing for
  /// control tokens. Throws Error kInvalidArgument outside the vocabulary.
  [[nodiscard]] std::string piece(Token token) const;
  /// True for tokens that end an answer.
  [[nodiscard]] bool is_end(Token token) const;

  struct ChatMessage {
    std::string role;
    std::string content;
  };

  /// The model's own chat template applied to messages; throws kUnsupported
  /// when the model has none that llama.cpp knows.
  [[nodiscard]] std::string chat_prompt(
      std::span<const ChatMessage> messages, bool open_answer) const;

  [[nodiscard]] llama_model* handle() const noexcept { return model_.get(); }

 private:
  Model() = default;
  void load_weights(
      const std::filesystem::path& path, const ModelOptions& options);
  void check_token(std::string_view operation, Token token) const;

  ModelHandle model_;
  std::string name_;
  std::string architecture_;
  std::string fingerprint_;
  std::string file_fingerprint_;
  RopeFacts rope_;
  std::vector<AttentionLayer> layers_;
  std::size_t vocabulary_ = 0;
  std::size_t trained_length_ = 0;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace qfilters::llama
