#pragma once

#include <csignal>

namespace qfilters::cli {

/// While it lives, SIGINT, SIGTERM and SIGHUP only set a flag.
class InterruptGuard {
 public:
  enum class Mode {
    kOnce,    ///< a second signal kills as usual
    kAlways,  ///< for clean-up that must not be cut short
  };
  explicit InterruptGuard(Mode mode);
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  ~InterruptGuard();

  /// The signal that came since the first guard was made; 0 for none.
  [[nodiscard]] static int signal() noexcept;

 private:
  struct sigaction old_int_ {};

  struct sigaction old_term_ {};

  struct sigaction old_hangup_ {};
};

}  // namespace qfilters::cli
