#!/usr/bin/env bash
# Runs every fuzz target of build/fuzz for FUZZ_SECONDS (60) each, from the
# saved corpus and valid files of today's formats. A finding is printed, with
# the file that shows it, and makes the script fail after the last target.
# `tools/fuzz.sh --save` adds to tests/fuzz/corpus what earlier runs found new.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

build=$ROOT/build/fuzz
saved=$ROOT/tests/fuzz/corpus
# A few KiB are enough for every reader; what allocates much more than it was
# given is a finding.
limits=(-max_len=8192 -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=64)

"$build/bin/fuzz_seeds" "$build/seeds"
cp "$ROOT"/tests/data/golden/artifacts/*.npz "$build/seeds/npz"
mkdir -p "$build/findings"
export ASAN_OPTIONS=allow_addr2line=1
failed=()
for program in "$build"/bin/fuzz_*; do
  target=${program##*/fuzz_}
  [[ $target != seeds ]] || continue
  mkdir -p "$build/corpus/$target" "$build/seeds/$target" "$saved/$target"
  if [[ ${1-} == --save ]]; then
    # By edges alone, or hundreds of files differ in how often loops run.
    "$program" "${limits[@]}" -set_cover_merge=1 -use_counters=0 \
      "$saved/$target" "$build/corpus/$target"
    continue
  fi
  say "$target: ${FUZZ_SECONDS:=60} s"
  "$program" "${limits[@]}" -max_total_time="$FUZZ_SECONDS" \
    -print_final_stats=1 -artifact_prefix="$build/findings/$target-" \
    "$build/corpus/$target" "$saved/$target" "$build/seeds/$target" \
    2>"$build/$target.log" || {
    failed+=("$target")
    tail -n 60 "$build/$target.log" >&2
  }
  sed -n 's/^stat::number_of_executed_units: */  executions /p' \
    "$build/$target.log"
done
[[ ${#failed[@]} == 0 ]] || die "findings in ${failed[*]}: $build/findings"
