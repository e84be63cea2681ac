#include "qfilters/isa.h"

#include <algorithm>

#include "qfilters/error.h"

#include "kernels/target.h"

namespace qfilters {

namespace {

// Best first.
std::vector<kernels::Target> targets() {
  std::vector<kernels::Target> out;
  for (kernels::Target rest = kernels::runnable_targets(); rest != 0;
       rest &= rest - 1) {
    out.push_back(rest & -rest);
  }
  return out;
}

std::string name_of(kernels::Target target) {
  std::string name = kernels::target_name(target);
  std::ranges::transform(name, name.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return name;
}

}  // namespace

std::vector<std::string> runnable_isas() {
  std::vector<std::string> out;
  for (const kernels::Target target : targets()) {
    out.push_back(name_of(target));
  }
  return out;
}

std::string active_isa() {
  return name_of(kernels::active_target());
}

void set_isa(std::string_view name) {
  const auto all = targets();
  const auto found = name.empty() || name == "auto"
                         ? all.begin()
                         : std::ranges::find(all, name, name_of);
  if (found == all.end()) {
    std::string list;
    for (const kernels::Target target : all) {
      list += (list.empty() ? "" : ", ") + name_of(target);
    }
    throw Error(
        ErrorKind::kInvalidArgument,
        "isa: '" + std::string(name) + "' cannot run here; what can: " + list);
  }
  kernels::choose_target(*found);
}

}  // namespace qfilters
