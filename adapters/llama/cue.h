#pragma once

namespace qfilters::llama {

/// What leads into a second reading, in calibration and policy reconstruct
/// alike: the words of KVzip's (arXiv:2505.23416) repeat prompt do not matter,
/// that there is one does.
inline constexpr const char* kCue = "\n\nRepeat the text above exactly.\n\n";

}  // namespace qfilters::llama
