#pragma once

#include <exception>
#include <utility>

namespace qfilters {

/// Carries an exception out of a parallel loop, which it must not leave by
/// itself.
class FirstFailure {
 public:
  template <typename Body>
  void guard(Body&& body) noexcept {
    try {
      std::forward<Body>(body)();
    } catch (...) {
#pragma omp critical
      if (!failure_) failure_ = std::current_exception();
    }
  }

  /// Not while another thread may be in guard().
  [[nodiscard]] bool failed() const noexcept {
    return failure_ != nullptr;
  }

  /// Throws what was caught, if anything.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::exception_ptr failure_;
};

}  // namespace qfilters
