#!/usr/bin/env bash
# Makes .venv with the pinned packages of packages/pip.txt.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

list=$ROOT/packages/pip.txt
venv=$ROOT/.venv
stamp=$venv/installed.txt # a copy of the list, written when all is in place

up_to_date() {
  cmp -s "$list" "$stamp" && "$venv/bin/python" -c '' 2>/dev/null
}

find_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import ensurepip, sys
sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  die "no python3 of version 3.11 or later with its venv module found"
}

up_to_date && exit 0
lock python
up_to_date && exit 0

python=$(find_python)
say "installing packages/pip.txt into .venv"
# Without its stamp a .venv is the remains of an interrupted run: start anew.
if [[ ! -f $stamp ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  quietly "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
quietly "$venv/bin/python" -m pip install --no-deps \
  --disable-pip-version-check -r "$list"
cp "$list" "$stamp.new"
mv "$stamp.new" "$stamp"
