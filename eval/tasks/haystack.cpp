#include "eval/tasks/haystack.h"

#include <algorithm>
#include <set>

namespace qfilters::eval {

namespace {

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

bool continues_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U;
}

/// Where the sentence that begins `text` ends, white space after it included.
std::size_t sentence_end(std::string_view text) {
  std::size_t last_space = 0;
  const std::size_t most = std::min(text.size(), Haystack::kLongest);
  for (std::size_t i = 1; i < most; ++i) {
    if (!is_space(text[i])) continue;
    const char stop = text[i - 1];
    last_space = i + 1;
    if (stop != '.' && stop != '!' && stop != '?') continue;
    std::size_t end = i;
    while (end < text.size() && is_space(text[end])) {
      ++end;
    }
    return end;
  }
  if (most == text.size()) return most;
  if (last_space != 0) return last_space;
  std::size_t end = most;
  while (end > 1 && continues_character(text[end])) {
    --end;
  }
  return end;
}

/// Part of a word, whatever the alphabet.
bool is_word_byte(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  return letter || (c >= '0' && c <= '9') || c == '_' || c == '\'' ||
         static_cast<unsigned char>(c) >= 0x80U;
}

bool is_plain(std::string_view word) {
  return word.size() >= 4 && word.size() <= 9 &&
         std::all_of(word.begin(), word.end(), [](char c) {
           return c >= 'a' && c <= 'z';
         });
}

}  // namespace

Haystack::Haystack(std::string_view text) {
  std::set<std::string_view> seen;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    while (end < text.size() && is_word_byte(text[end])) {
      ++end;
    }
    const std::string_view word = text.substr(i, end - i);
    if (is_plain(word) && seen.insert(word).second) words.emplace_back(word);
    i = end + 1;
  }
  while (!text.empty()) {
    const std::size_t end = sentence_end(text);
    sentences.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
}

}  // namespace qfilters::eval
