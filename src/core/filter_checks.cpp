#include "core/filter_checks.h"

#include <string>

#include "qfilters/error.h"

namespace qfilters {

void check_bank(
    const char* name,
    const FilterBank& filters,
    std::size_t layer,
    std::size_t heads,
    std::size_t dim) {
  const bool exists = layer < filters.layers();
  if (exists && filters.layer(layer).heads == heads &&
      filters.layer(layer).dim == dim) {
    return;
  }
  const std::string have =
      exists ? "[" + std::to_string(filters.layer(layer).heads) + ", " +
                   std::to_string(filters.layer(layer).dim) + "]"
             : "none (" + std::to_string(filters.layers()) + " layers)";
  throw Error(
      ErrorKind::kMismatch,
      std::string(name) + ": layer " + std::to_string(layer) +
          " needs filters [" + std::to_string(heads) + ", " +
          std::to_string(dim) + "], the filters have " + have);
}

void check_given(const char* name, const FilterBank* filters) {
  if (filters != nullptr) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      std::string(name) + ": no filters; make them with `qfilters calibrate`");
}

}  // namespace qfilters
