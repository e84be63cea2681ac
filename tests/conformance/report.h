#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qfilters/error.h"

namespace qfilters::golden {

/// How one golden case came out.
struct Outcome {
  std::string difference;  ///< not empty: failed
  std::string decision;    ///< not empty: differs by this decision
  std::string right;       ///< the right value, which was checked
  std::string note;        ///< passed, but a reader should know this

  static Outcome passed() { return {}; }

  /// Passed where `difference` is empty.
  static Outcome failed(std::string difference) {
    Outcome out;
    out.difference = std::move(difference);
    return out;
  }

  static Outcome decided(std::string_view decision, std::string right) {
    Outcome out;
    out.decision = decision;
    out.right = std::move(right);
    return out;
  }

  static Outcome noted(std::string note) {
    Outcome out;
    out.note = std::move(note);
    return out;
  }
};

/// Why a case of the reference is answered differently. The names are those
/// of the decisions in the project's specification.
inline constexpr std::string_view kNonFiniteRule =
    "A3: protected rows always stay, a NaN score is evicted first";
inline constexpr std::string_view kOffsetRule =
    "A4: the update is complete before the error";
inline constexpr std::string_view kConfigRule =
    "A7: senseless options are refused";
inline constexpr std::string_view kLoaderRule =
    "A14: the loader checks rank and shape";
inline constexpr std::string_view kTypeRule = "C++ cannot express it";

/// Counts and prints what the groups report.
class Report {
 public:
  void begin(std::string group);

  /// `call` replays case `id` and returns its Outcome; an Error that escapes
  /// it fails the case.
  template <typename Call>
  void check(const std::string& id, Call&& call) {
    try {
      record(id, call());
    } catch (const Error& error) {
      record(id, Outcome::failed(std::string("error: ") + error.what()));
    }
  }

  void end();

  /// Prints the decided differences and the totals; true without a failure.
  [[nodiscard]] bool finish() const;

  [[nodiscard]] std::size_t cases() const noexcept;

 private:
  struct Counts {
    std::size_t passed = 0;
    std::size_t failed = 0;
    std::size_t decided = 0;
  };

  void record(const std::string& id, const Outcome& outcome);

  std::string group_;
  Counts now_;
  Counts total_;
  std::vector<std::string> decided_;
  std::vector<std::string> notes_;
};

}  // namespace qfilters::golden
