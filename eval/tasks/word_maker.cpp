#include "eval/tasks/word_maker.h"

namespace qfilters::eval {

std::string WordMaker::word(std::size_t syllables) {
  constexpr std::size_t kTries = 64;  // then a syllable more
  for (std::size_t tries = 1;; ++tries) {
    std::string made;
    for (std::size_t i = 0; i < syllables + tries / kTries; ++i) {
      made += pick("bdfgklmnprstv");
      made += pick("aeiou");
    }
    if (take(made)) return made;
  }
}

std::string WordMaker::name() {
  const std::string first = word(2);
  return first + "-" + word(2);
}

std::string WordMaker::number(std::size_t digits) {
  constexpr std::string_view kDigits = "0123456789";
  constexpr std::size_t kTries = 64;
  for (std::size_t tries = 1;; ++tries) {
    std::string made(1, pick(kDigits.substr(1)));
    while (made.size() < digits + tries / kTries) {
      made += pick(kDigits);
    }
    if (take(made)) return made;
  }
}

std::string WordMaker::uuid() {
  std::string made;
  for (std::size_t i = 0; i < 36; ++i) {
    if (i == 8 || i == 13 || i == 18 || i == 23) {
      made += '-';
    } else if (i == 14) {
      made += '4';
    } else {
      made += pick(i == 19 ? "89ab" : "0123456789abcdef");
    }
  }
  return take(made) ? made : uuid();
}

std::string WordMaker::variable(std::size_t letters) {
  std::string made;
  for (std::size_t i = 0; i < letters; ++i) {
    made += pick("ABCDEFGHIJKLMNOPQRSTUVWXYZ");
  }
  return take(made) ? made : variable(letters);
}

}  // namespace qfilters::eval
