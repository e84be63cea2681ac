#include "io/sign.h"

#include <span>
#include <string>
#include <string_view>

#include "io/input_file.h"

namespace qfilters::io {

std::string_view sign_name(FilterSign sign) {
  return sign == FilterSign::kPositive ? "positive" : "negated";
}

FilterSign parse_sign(std::string_view name) {
  for (const FilterSign sign : {FilterSign::kPositive, FilterSign::kNegated}) {
    if (name == sign_name(sign)) return sign;
  }
  fail("sign '" + std::string(name) + "' is neither positive nor negated");
}

void apply_sign(FilterSign sign, std::span<float> values) {
  if (sign == FilterSign::kPositive) return;
  for (float& value : values) {
    value = -value;
  }
}

}  // namespace qfilters::io
