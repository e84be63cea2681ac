#pragma once

#include <cstdint>

namespace qfilters::kernels {

/// An instruction set that the kernels are compiled for: one bit, as Highway
/// counts them, a lower bit for a better one.
using Target = std::int64_t;

/// The bits of all targets that can run here.
Target runnable_targets() noexcept;

/// Where a kernel that is called now runs.
Target active_target() noexcept;

/// Sends all kernels of the process to one of runnable_targets(), which must
/// have been called before.
void choose_target(Target target) noexcept;

const char* target_name(Target target) noexcept;

}  // namespace qfilters::kernels
