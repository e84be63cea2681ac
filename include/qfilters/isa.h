#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace qfilters {

/// Instruction sets that the kernels can run on in this process, best first:
/// compiled in and offered by the CPU ("avx3", "avx2", "sse4", "ssse3" on
/// x86-64). The last is always "scalar", which needs nothing.
[[nodiscard]] std::vector<std::string> runnable_isas();

/// The one that the kernels run on now: the best, unless set_isa() chose.
/// Scores, and so the kept rows, are the same bits on each; attention differs
/// by rounding.
[[nodiscard]] std::string active_isa();

/// Runs every kernel of the process on `name` from the next call on; "auto" or
/// "" is the best. It can be changed at any time, but not while another thread
/// is inside the library. Whatever else in the process uses the same Highway
/// library follows. Throws Error kInvalidArgument, with the names that do run
/// here, for any other name; nothing changes then.
void set_isa(std::string_view name);

}  // namespace qfilters
