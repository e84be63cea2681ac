// Uses the core and the file library through the installed headers alone.
#include <cstdio>
#include <filesystem>

#include <qfilters/filter_file.h>
#include <qfilters/qfilters.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::filesystem::path path = argv[1];
  const qfilters::FilterBank bank(
      {{1, 2, {0.6F, 0.8F}}}, qfilters::FilterMetadata{});
  qfilters::save_filters(bank, path);
  const auto back = qfilters::load_filters(path);
  qfilters::QFiltersKVCache cache(qfilters::Config{}, back.layer(0));
  std::printf("%s %d\n", qfilters::kVersion, static_cast<int>(back.layers()));
  return back.fingerprint() == bank.fingerprint() ? 0 : 1;
}
