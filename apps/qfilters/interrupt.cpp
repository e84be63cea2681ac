#include "interrupt.h"

namespace qfilters::cli {

namespace {

volatile std::sig_atomic_t g_signal = 0;

extern "C" void note_signal(int signal) {
  g_signal = signal;
}

}  // namespace

InterruptGuard::InterruptGuard(Mode mode) {
  struct sigaction action {};

  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  // No SA_RESTART: a signal must also end a wait for the user's next line.
  action.sa_flags = mode == Mode::kOnce ? static_cast<int>(SA_RESETHAND) : 0;
  sigaction(SIGINT, &action, &old_int_);
  sigaction(SIGTERM, &action, &old_term_);
  sigaction(SIGHUP, &action, &old_hangup_);
}

InterruptGuard::~InterruptGuard() {
  sigaction(SIGINT, &old_int_, nullptr);
  sigaction(SIGTERM, &old_term_, nullptr);
  sigaction(SIGHUP, &old_hangup_, nullptr);
}

int InterruptGuard::signal() noexcept {
  return g_signal;
}

}  // namespace qfilters::cli
