# shellcheck shell=bash
# Sourced by the install scripts. Defines ROOT and four helpers.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# lock NAME: from here to its end, only one run of the script at a time.
lock() {
  mkdir -p "$ROOT/.deps"
  exec 9>"$ROOT/.deps/$1.lock"
  flock 9
}

# quietly COMMAND...: no output, unless it fails.
quietly() {
  local log
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    rm -f "$log"
    die "failed: $*"
  fi
  rm -f "$log"
}
