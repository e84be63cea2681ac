#pragma once

#include <stdexcept>
#include <string>

namespace qfilters {

/// What went wrong, so that a host can react without reading the message.
enum class ErrorKind {
  kInvalidArgument,  ///< an option or argument outside its range
  kShape,            ///< shapes or element types that do not fit together
  kFile,             ///< missing, unreadable, damaged or unwritable file
  kMismatch,         ///< valid data that belongs to another model or setting
  kUnsupported,      ///< a model or feature that this build cannot serve
  kMemoryLimit,      ///< the byte limit of a RowPool would be exceeded
  kLowRetention,     ///< the retention floor was crossed (policy "raise")
  kRuntime,          ///< the model runtime failed
};

/// The one exception type of the library. The message starts with the
/// operation and carries the values: "select: keep=9 exceeds rows=8".
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace qfilters
