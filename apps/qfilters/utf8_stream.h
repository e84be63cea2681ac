#pragma once

#include <string>
#include <string_view>

namespace qfilters::cli {

/// Turns pieces of UTF-8, cut anywhere, into whole characters: a token may
/// hold only part of one.
class Utf8Stream {
 public:
  /// The whole characters so far that were not given out yet; the start of an
  /// incomplete one is held back, U+FFFD stands for one that does not go on.
  [[nodiscard]] std::string push(std::string_view bytes);

  /// The bytes held back.
  [[nodiscard]] const std::string& held() const noexcept { return held_; }

  /// U+FFFD if an incomplete character was held back, else nothing.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;
};

}  // namespace qfilters::cli
