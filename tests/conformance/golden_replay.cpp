// Replays a folder of golden vectors of the reference system through the
// public API: golden_replay [--if-present] DIR
//
// Prints one line per group, then every case that is answered differently on
// purpose with the decision and the right value that was checked instead.
// Exit status: 0 all as it must be, 1 some case differs otherwise, 2 DIR is no
// golden folder, 77 there is no DIR and --if-present was given.

#include <array>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>

#include "conformance/golden_set.h"
#include "conformance/groups.h"
#include "conformance/report.h"

namespace {

using namespace qfilters::golden;  // NOLINT(google-build-using-namespace)

constexpr int kBadFolder = 2;
constexpr int kSkipped = 77;

struct Group {
  const char* name;
  void (*replay)(const GoldenSet&, Report&);
};

constexpr std::array kGroups = {
    Group{"selection", replay_selection},
    Group{"fallback", replay_fallback},
    Group{"dtype", replay_dtype},
    Group{"edge", replay_edge},
    Group{"retention", replay_retention},
    Group{"mask", replay_mask},
    Group{"calib", replay_calib},
    Group{"artifacts", replay_artifacts},
    Group{"construct", replay_construct},
};

void check_names(const GoldenSet& set) {
  for (const auto& item : set.groups().items()) {
    bool known = false;
    for (const Group& group : kGroups) {
      known = known || item.key() == group.name;
    }
    if (!known) throw BadFolder("the manifest has a group " + item.key());
  }
}

bool replay(const std::filesystem::path& folder) {
  const GoldenSet set(folder);
  check_names(set);
  Report report;
  for (const Group& group : kGroups) {
    if (!set.groups().contains(group.name)) {
      std::cout << group.name << " is not in this set\n";
      continue;
    }
    report.begin(group.name);
    group.replay(set, report);
    report.end();
  }
  if (report.cases() == 0) throw BadFolder("the manifest has no cases");
  return report.finish();
}

}  // namespace

int main(int argc, char** argv) {
  const bool if_present = argc == 3 && std::string(argv[1]) == "--if-present";
  if (argc != 2 && !if_present) {
    std::cerr << "usage: golden_replay [--if-present] DIR\n";
    return kBadFolder;
  }
  const std::filesystem::path folder = argv[argc - 1];
  if (if_present && !std::filesystem::exists(folder)) {
    std::cout << "skipped: there is no folder " << folder.string() << '\n';
    return kSkipped;
  }
  try {
    return replay(folder) ? 0 : 1;
  } catch (const std::exception& error) {  // BadFolder, or the manifest's JSON
    std::cerr << "golden_replay: '" << folder.string()
              << "' is no golden folder: " << error.what() << '\n';
    return kBadFolder;
  }
}
