#include "utf8_stream.h"

#include <algorithm>
#include <cstddef>

namespace qfilters::cli {

namespace {

/// Bytes of the character that starts with `lead`; 1 for what starts none.
std::size_t character_bytes(unsigned char lead) {
  if (lead >= 0xF0U && lead < 0xF8U) return 4;
  if (lead >= 0xE0U && lead < 0xF0U) return 3;
  if (lead >= 0xC0U && lead < 0xE0U) return 2;
  return 1;
}

/// Bytes at the end of `text` that begin a character and do not complete it.
std::size_t incomplete_tail(std::string_view text) {
  const std::size_t most = std::min<std::size_t>(text.size(), 3);
  for (std::size_t back = 1; back <= most; ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0U) == 0x80U) continue;
    return character_bytes(byte) > back ? back : 0;
  }
  return 0;
}

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  std::string out;
  const bool goes_on =
      !bytes.empty() && (static_cast<unsigned char>(bytes[0]) & 0xC0U) == 0x80U;
  if (!bytes.empty() && !goes_on) out = finish();
  held_ += bytes;
  const std::size_t whole = held_.size() - incomplete_tail(held_);
  out += held_.substr(0, whole);
  held_.erase(0, whole);
  return out;
}

std::string Utf8Stream::finish() {
  if (held_.empty()) return {};
  held_.clear();
  return "\xEF\xBF\xBD";
}

}  // namespace qfilters::cli
