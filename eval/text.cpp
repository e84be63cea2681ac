#include "eval/text.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"

namespace qfilters::eval {

namespace {

constexpr std::size_t kSliceBytes = std::size_t{64} << 10;

std::ifstream open(const std::filesystem::path& path) {
  // A folder opens, and then fails to read without a reason.
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  std::ifstream file;
  if (!folder) file.open(path, std::ios::binary);
  if (!file.is_open()) {
    const char* const reason = std::strerror(folder ? EISDIR : errno);
    throw Error(
        ErrorKind::kFile, "text: cannot read " + path.string() + ": " + reason);
  }
  return file;
}

/// Where to cut a slice: after its last line end, else before its last space,
/// else before the last character.
std::size_t cut(std::string_view slice) {
  const std::size_t line = slice.rfind('\n');
  if (line != std::string_view::npos) return line + 1;
  const std::size_t space = slice.rfind(' ');
  if (space != std::string_view::npos && space > 0) return space;
  std::size_t end = slice.size();
  const auto continues = [&](std::size_t i) {
    return (static_cast<unsigned char>(slice[i]) & 0xC0U) == 0x80U;
  };
  do {
    --end;
  } while (end > 1 && continues(end));
  return end;
}

}  // namespace

Codec make_codec(const std::shared_ptr<const llama::Model>& model) {
  Codec codec;
  codec.prefix = model->tokenize("", true, false);
  codec.vocabulary = model->vocabulary();
  codec.tokenize = [model](std::string_view text) {
    return model->tokenize(text, false, false);
  };
  codec.piece = [model](Token token) { return model->piece(token); };
  codec.is_end = [model](Token token) { return model->is_end(token); };
  return codec;
}

std::vector<Token> read_tokens(
    const std::filesystem::path& path,
    const Codec& codec,
    std::size_t skip,
    std::size_t count) {
  std::ifstream file = open(path);
  std::vector<Token> tokens;
  std::size_t seen = 0;
  std::string slice;
  while (tokens.size() < count) {
    const std::size_t held = slice.size();
    slice.resize(held + kSliceBytes);
    file.read(slice.data() + held, static_cast<std::streamsize>(kSliceBytes));
    slice.resize(held + static_cast<std::size_t>(file.gcount()));
    if (file.bad()) {
      throw Error(ErrorKind::kFile, "text: cannot read " + path.string());
    }
    if (slice.empty()) break;
    const std::size_t end = file.eof() ? slice.size() : cut(slice);
    for (const Token token :
         codec.tokenize(std::string_view(slice).substr(0, end))) {
      if (seen++ >= skip && tokens.size() < count) tokens.push_back(token);
    }
    slice.erase(0, end);
  }
  if (tokens.size() < count) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "text: " + path.string() + " is too short: " + std::to_string(seen) +
            " tokens, but " + std::to_string(count) + " are needed" +
            (skip == 0 ? "" : " after skipping " + std::to_string(skip)));
  }
  return tokens;
}

std::string hash_file(const std::filesystem::path& path) {
  std::ifstream file = open(path);
  Fingerprint fingerprint;
  std::string buffer(kSliceBytes, '\0');
  do {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    fingerprint.add(std::string_view(buffer).substr(
        0, static_cast<std::size_t>(file.gcount())));
  } while (file);
  if (file.bad()) {
    throw Error(ErrorKind::kFile, "text: cannot read " + path.string());
  }
  return fingerprint.hex();
}

}  // namespace qfilters::eval
