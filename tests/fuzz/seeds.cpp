// Writes valid inputs of today's formats: fuzz_seeds FOLDER makes
// FOLDER/<target>/<name> for the targets that read binary files.
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

#include "qfilters/atomic_file.h"
#include "qfilters/filter_file.h"

#include "fuzz/sealed.h"
#include "fuzz/small_caches.h"

namespace {

namespace fs = std::filesystem;
using qfilters::FilterBank;
using qfilters::FilterMetadata;
using qfilters::LayerFilters;
using qfilters::QFiltersKVCache;
using qfilters::SequenceCache;
using qfilters::write_file_atomically;

void write_filters(const fs::path& folder) {
  FilterMetadata metadata;
  metadata.model_id = "model";
  metadata.n_samples = 7;
  const LayerFilters layer{2, 3, {1, -2, 0.5F, 0, 1, -1}};
  const FilterBank filters({layer, layer}, metadata);
  for (const char* format : {"npz", "safetensors", "gguf"}) {
    fs::create_directories(folder / format);
    save_filters(filters, folder / format / (std::string("good.") + format));
  }
}

// Tokens seen: none, below the budget, below and above what freezes, more than
// the window.
constexpr std::size_t kTokens[] = {0, 5, 11, 14, 100};

void write_snapshots(const fs::path& folder) {
  fs::create_directories(folder / "sequence_snapshot");
  fs::create_directories(folder / "kv_cache_snapshot");
  for (const std::size_t tokens : kTokens) {
    for (const std::string_view policy : qfilters::fuzz::kPolicies) {
      for (const qfilters::RowFormat format : qfilters::fuzz::kFormats) {
        SequenceCache cache = qfilters::fuzz::small_sequence(policy, format);
        if (tokens > 0) qfilters::fuzz::update(cache, tokens);
        write_file_atomically(
            folder / "sequence_snapshot" /
                (std::string(policy) + "-" + to_string(format) + "-" +
                 std::to_string(tokens)),
            qfilters::fuzz::unsealed(cache.save()));
      }
    }
    for (const bool calibrated : {true, false}) {
      QFiltersKVCache cache = qfilters::fuzz::small_cache(calibrated);
      if (tokens > 0) qfilters::fuzz::update(cache, tokens);
      write_file_atomically(
          folder / "kv_cache_snapshot" /
              ((calibrated ? "calibrated-" : "fallback-") +
               std::to_string(tokens)),
          qfilters::fuzz::unsealed(cache.save()));
    }
  }
  fs::create_directories(folder / "snapshot");
  qfilters::Snapshot small;
  small.put_text("name", "text");
  small.put("empty", {});
  write_file_atomically(
      folder / "snapshot" / "small", qfilters::fuzz::unsealed(small));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  write_filters(argv[1]);
  write_snapshots(argv[1]);
}
