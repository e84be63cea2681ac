#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "qfilters/snapshot.h"

#include "chat.h"
#include "generation.h"

namespace qfilters::cli {

/// A run as `generate --save-state` keeps it: the generation with its session,
/// the conversation, and the bytes of a character that the last token left
/// unfinished.
class StateFile {
 public:
  /// An empty path: none is wanted.
  StateFile(
      std::string path,
      const Generation& generation,
      const Conversation& conversation)
      : path_(std::move(path)),
        generation_(generation),
        conversation_(conversation) {}

  [[nodiscard]] bool wanted() const noexcept { return !path_.empty(); }

  [[nodiscard]] bool written() const noexcept { return written_; }

  /// Writes it, if it is wanted. Throws Error kFile; an older file is as it
  /// was then. A signal waits for the end.
  void write(std::string_view unfinished = {});

 private:
  std::string path_;
  const Generation& generation_;
  const Conversation& conversation_;
  bool written_ = false;
};

/// Goes on from a snapshot that StateFile wrote; see Generation::restore() for
/// `seed_given`. Returns the unfinished bytes.
[[nodiscard]] std::string restore_state(
    const Snapshot& saved,
    bool seed_given,
    Generation& generation,
    Conversation& conversation);

}  // namespace qfilters::cli
