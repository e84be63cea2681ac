#!/usr/bin/env bash
# Installs what is missing of packages/debian.txt. Needs root only then.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! command -v dpkg-query >/dev/null; then
  say "not a Debian system: have the like of packages/debian.txt installed"
  exit 0
fi

mapfile -t wanted < <(sed 's/#.*//' "$ROOT/packages/debian.txt" | xargs -n1)

missing() {
  local installed
  # dpkg-query fails when it does not know one of the names, but still lists
  # the others.
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' \
    "${wanted[@]}" 2>/dev/null | sed -n 's/^installed //p') || true
  printf '%s\n' "${wanted[@]}" | grep -vxF -f <(printf '%s\n' "$installed") ||
    true
}

packages=$(missing | xargs)
[[ -n $packages ]] || exit 0

as_root=()
if [[ $(id -u) != 0 ]]; then
  command -v sudo >/dev/null ||
    die "root is needed for: apt-get install $packages"
  as_root=(sudo)
fi

lock debian
packages=$(missing | xargs) # another run may have installed them meanwhile
[[ -n $packages ]] || exit 0

say "installing $packages"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
  apt-get -qqy -o DPkg::Lock::Timeout=300)
quietly "${apt[@]}" update
# shellcheck disable=SC2086  # one word a package
quietly "${apt[@]}" install --no-install-recommends $packages
