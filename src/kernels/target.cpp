#include "kernels/target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/target.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/targets.h>

HWY_BEFORE_NAMESPACE();

namespace qfilters::kernels::HWY_NAMESPACE {

// Dispatched like every kernel, so that the answer is what dispatch does.
Target own_target() {
  return HWY_TARGET;
}

}  // namespace qfilters::kernels::HWY_NAMESPACE

HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace qfilters::kernels {

HWY_EXPORT(own_target);

Target runnable_targets() noexcept {
  // Once: a choice hides the others from Highway. Plain C++ runs anywhere;
  // Highway has two names for it and may report the other one.
  static const Target targets =
      (hwy::SupportedTargets() | HWY_EMU128 | HWY_SCALAR) & HWY_TARGETS;
  return targets;
}

Target active_target() noexcept {
  return HWY_DYNAMIC_DISPATCH(own_target)();
}

void choose_target(Target target) noexcept {
  // Of Highway's ways, the one that lasts: each call of SupportedTargets(), by
  // whomever, forgets ChosenTarget::Update() and DisableTargets().
  hwy::SetSupportedTargetsForTest(target);
}

const char* target_name(Target target) noexcept {
  return hwy::TargetName(target == HWY_EMU128 ? HWY_SCALAR : target);
}

}  // namespace qfilters::kernels

#endif  // HWY_ONCE
