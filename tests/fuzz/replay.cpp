// Gives every file of the named folders to a fuzz target, without libFuzzer:
//   fuzz_<target> FOLDER... [--if-present FOLDER...]
// A folder without files is a failure, unless it may be absent.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(
    const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

std::size_t replay(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& path : files) {
    std::fprintf(stderr, "%s\n", path.c_str());  // the last one if it crashes
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> input{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(
        reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  }
  return files.size();
}

}  // namespace

int main(int argc, char** argv) {
  bool may_be_absent = false;
  std::size_t inputs = 0;
  for (int i = 1; i < argc; ++i) {
    const fs::path folder = argv[i];
    if (folder == "--if-present") {
      may_be_absent = true;
    } else if (fs::is_directory(folder) || !may_be_absent) {
      const std::size_t count = fs::is_directory(folder) ? replay(folder) : 0;
      if (count == 0) {
        std::fprintf(stderr, "no inputs in %s\n", folder.c_str());
        return 1;
      }
      inputs += count;
    }
  }
  std::printf("%zu inputs\n", inputs);
  return inputs == 0 ? 1 : 0;
}
