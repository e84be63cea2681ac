#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llama/model.h"

namespace qfilters::eval {

using llama::Token;

/// What the tasks need of a model's vocabulary; tests bring their own.
struct Codec {
  /// Text to tokens; nothing is put in front, control tokens stay text.
  std::function<std::vector<Token>(std::string_view)> tokenize;
  std::function<std::string(Token)> piece;
  /// Whether a token ends an answer; unset: none does.
  std::function<bool(Token)> is_end;
  std::vector<Token> prefix;  ///< what the model wants in front of a text
  std::size_t vocabulary = 0;
};

[[nodiscard]] Codec make_codec(
    const std::shared_ptr<const llama::Model>& model);

/// Tokens [skip, skip + count) of a text file, without the prefix. The file is
/// tokenized in slices of fixed places, so the result does not depend on
/// skip and count, and memory does not grow with the rest of the file.
/// Throws Error kFile for an unreadable file, kInvalidArgument when the text
/// is too short.
[[nodiscard]] std::vector<Token> read_tokens(
    const std::filesystem::path& path,
    const Codec& codec,
    std::size_t skip,
    std::size_t count);

/// FNV-1a 64 of a file's bytes, 16 hex digits. Throws Error kFile.
[[nodiscard]] std::string hash_file(const std::filesystem::path& path);

}  // namespace qfilters::eval
