#include "state_file.h"

#include "qfilters/snapshot_file.h"

#include "interrupt.h"

namespace qfilters::cli {

namespace {

constexpr const char* kUnfinished = "unfinished";

}  // namespace

void StateFile::write(std::string_view unfinished) {
  if (!wanted()) return;
  const InterruptGuard guard(InterruptGuard::Mode::kAlways);
  Snapshot snapshot = generation_.save();
  conversation_.save(snapshot);
  snapshot.put_text(kUnfinished, unfinished);
  save_snapshot(snapshot, path_);
  written_ = true;
}

std::string restore_state(
    const Snapshot& saved,
    bool seed_given,
    Generation& generation,
    Conversation& conversation) {
  generation.restore(saved, seed_given);
  conversation.restore(saved);
  return saved.text(kUnfinished);
}

}  // namespace qfilters::cli
