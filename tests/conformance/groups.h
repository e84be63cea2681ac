#pragma once

#include "conformance/golden_set.h"
#include "conformance/report.h"

namespace qfilters::golden {

// One function per group of the manifest: each replays all its cases.

void replay_selection(const GoldenSet& set, Report& report);
void replay_fallback(const GoldenSet& set, Report& report);
void replay_dtype(const GoldenSet& set, Report& report);
void replay_edge(const GoldenSet& set, Report& report);
void replay_retention(const GoldenSet& set, Report& report);
void replay_mask(const GoldenSet& set, Report& report);
void replay_calib(const GoldenSet& set, Report& report);
void replay_artifacts(const GoldenSet& set, Report& report);
void replay_construct(const GoldenSet& set, Report& report);

/// How far a float32 estimate of a head's main axis may be from one in
/// float64, for eigenvalues lambda1 >= lambda2 of the covariance.
[[nodiscard]] double direction_bound(double lambda1, double lambda2);

}  // namespace qfilters::golden
