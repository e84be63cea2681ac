#pragma once

#include <cstdio>
#include <cstdlib>

namespace qfilters::fuzz {

/// A finding unless `holds`: says what is wrong and ends the process.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

}  // namespace qfilters::fuzz
