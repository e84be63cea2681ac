#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qfilters::eval {

/// Makes names and values from a seed, the same on every machine. What one
/// maker gives differs from all it gave before, whatever its kind.
class WordMaker {
 public:
  explicit WordMaker(std::uint64_t seed) : engine_(seed) {}

  /// A number below `count` (1 or more).
  [[nodiscard]] std::size_t below(std::size_t count) {
    return static_cast<std::size_t>(engine_() % count);
  }

  /// In [0, 1).
  [[nodiscard]] double fraction() {
    return static_cast<double>(engine_() >> 11U) * 0x1p-53;
  }

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[below(i)]);
    }
  }

  /// A word that can be spoken: syllables of a consonant and a vowel, a few
  /// more when all short ones are taken.
  [[nodiscard]] std::string word(std::size_t syllables);
  /// Two words with a hyphen, as a name.
  [[nodiscard]] std::string name();
  /// A decimal number; the first digit is not 0.
  [[nodiscard]] std::string number(std::size_t digits);
  /// Lower-case hexadecimal, 8-4-4-4-12 digits, version 4.
  [[nodiscard]] std::string uuid();
  /// Upper-case letters.
  [[nodiscard]] std::string variable(std::size_t letters);

  /// Marks a word as given, so that none like it is made. False if it was.
  bool take(std::string word) { return given_.insert(std::move(word)).second; }

 private:
  char pick(std::string_view from) { return from[below(from.size())]; }

  std::mt19937_64 engine_;
  std::set<std::string> given_;
};

}  // namespace qfilters::eval
