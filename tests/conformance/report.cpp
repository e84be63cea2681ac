#include "conformance/report.h"

#include <iostream>
#include <utility>

namespace qfilters::golden {

void Report::begin(std::string group) {
  group_ = std::move(group);
  now_ = {};
}

void Report::record(const std::string& id, const Outcome& outcome) {
  if (!outcome.difference.empty()) {
    ++now_.failed;
    std::cout << "FAILED " << group_ << ' ' << id << ": " << outcome.difference
              << '\n';
  } else if (!outcome.decision.empty()) {
    ++now_.decided;
    decided_.push_back(
        group_ + ' ' + id + " [" + outcome.decision + "] " + outcome.right);
  } else {
    ++now_.passed;
  }
  if (!outcome.note.empty()) {
    notes_.push_back(group_ + ' ' + id + ": " + outcome.note);
  }
}

void Report::end() {
  std::cout << group_ << ' ' << now_.passed << " passed, " << now_.failed
            << " failed";
  if (now_.decided > 0) std::cout << ", " << now_.decided << " decided";
  std::cout << std::endl;  // progress, also in a pipe
  total_.passed += now_.passed;
  total_.failed += now_.failed;
  total_.decided += now_.decided;
}

bool Report::finish() const {
  for (const std::string& note : notes_) {
    std::cout << "note: " << note << '\n';
  }
  std::cout << total_.decided << " decided differences, each checked against "
            << "the right value" << (decided_.empty() ? "" : ":") << '\n';
  for (const std::string& line : decided_) {
    std::cout << "  " << line << '\n';
  }
  std::cout << total_.passed << " passed, " << total_.failed << " failed"
            << std::endl;
  return total_.failed == 0;
}

std::size_t Report::cases() const noexcept {
  return total_.passed + total_.failed + total_.decided;
}

}  // namespace qfilters::golden
