#pragma once

// What a test program allocates: linking heap.cpp replaces operator new. What
// C code takes from malloc is left out.

#include <atomic>
#include <cstddef>

namespace qfilters::test {

struct Heap {
  std::atomic<std::size_t> allocations = 0;  ///< ever made
  std::atomic<std::size_t> live_bytes = 0;
  std::atomic<std::size_t> peak_bytes = 0;  ///< of live_bytes; may be set back
  /// The allocation that fails, counted from now on; 0: none. More than 1 GiB
  /// at once always fails: a machine that overcommits would grant it.
  std::atomic<int> until_failure = 0;
};

Heap& heap() noexcept;

}  // namespace qfilters::test
