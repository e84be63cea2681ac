#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace qfilters::eval {

/// A text in pieces that a needle may go between: whole sentences, as far as
/// they end, cut at a space when longer than kLongest bytes. Joined they are
/// the text. Never cuts a UTF-8 character. O(bytes).
struct Haystack {
  static constexpr std::size_t kLongest = 400;

  Haystack() = default;
  explicit Haystack(std::string_view text);

  std::vector<std::string> sentences;
  /// The different words of 4 to 9 lower-case ASCII letters, in order.
  std::vector<std::string> words;
};

}  // namespace qfilters::eval
