#include "qfilters/config.h"

#include "qfilters/error.h"

namespace qfilters {

namespace {

[[noreturn]] void reject(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, "config: " + what);
}

void reject_below(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least) {
    reject(
        std::string(field) + " must be at least " + std::to_string(least) +
        ", got " + std::to_string(value));
  }
}

}  // namespace

void validate(const Config& config) {
  const std::string& action = config.qfilters_on_low_retention;
  if (action != "warn" && action != "raise" && action != "ignore") {
    reject(
        "qfilters_on_low_retention must be warn, raise or ignore, got '" +
        action + "'");
  }
  if (config.qfilters_min_retention.has_value()) {
    const double floor = *config.qfilters_min_retention;
    if (!(floor > 0.0 && floor <= 1.0)) {  // rejects NaN too
      reject(
          "qfilters_min_retention must be in (0, 1] or none, got " +
          std::to_string(floor));
    }
  }
  if (config.qfilters_sign != 1 && config.qfilters_sign != -1) {
    reject(
        "qfilters_sign must be +1 or -1, got " +
        std::to_string(config.qfilters_sign));
  }
  reject_below("qfilters_n_sink", config.qfilters_n_sink, 0);
  reject_below("qfilters_recent", config.qfilters_recent, 0);
  reject_below("qfilters_calib_tokens", config.qfilters_calib_tokens, 1);
  reject_below("qfilters_interval", config.qfilters_interval, 0);
  // Written so that huge values cannot overflow.
  if (config.qfilters_n_sink >= config.qfilters_budget ||
      config.qfilters_recent >=
          config.qfilters_budget - config.qfilters_n_sink) {
    reject(
        "qfilters_n_sink (" + std::to_string(config.qfilters_n_sink) +
        ") + qfilters_recent (" + std::to_string(config.qfilters_recent) +
        ") must be below qfilters_budget (" +
        std::to_string(config.qfilters_budget) +
        "), or nothing can be evicted");
  }
  if (config.use_metal_kernels.value_or(false)) {
    throw Error(
        ErrorKind::kUnsupported,
        "config: use_metal_kernels=true needs Metal, which this build lacks");
  }
}

}  // namespace qfilters
