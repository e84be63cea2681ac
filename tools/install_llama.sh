#!/usr/bin/env bash
# Builds llama.cpp's libraries (see packages/llama.txt) into .deps/llama.cpp.
# Does nothing when QFILTERS_LLAMA_PREFIX names an installed llama.cpp.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ -z ${QFILTERS_LLAMA_PREFIX:-} ]] || exit 0

list=$ROOT/packages/llama.txt
prefix=$ROOT/.deps/llama.cpp
stamp=$prefix/installed.txt

# ggml compiles for the CPU it is built on, so the compiler's view of that CPU
# (its predefined macros) is part of what was installed.
cpu=$("${CXX:-c++}" -march=native -dM -E -x c++ /dev/null | sort | sha256sum) ||
  die "no C++ compiler found"
recipe=$(cat - "$list" "${BASH_SOURCE[0]}" <<<"$cpu" | sha256sum)

up_to_date() { [[ -f $stamp && $(<"$stamp") == "$recipe" ]]; }

up_to_date && exit 0
"$ROOT/tools/install_python.sh"
lock llama
up_to_date && exit 0

say "building llama.cpp, a few minutes the first time"
work=$prefix.work
rm -rf "$work"
mkdir "$work"
trap 'rm -rf "$work"' EXIT

quietly "$ROOT/.venv/bin/python" -m pip download --no-deps \
  --no-build-isolation --disable-pip-version-check -d "$work" -r "$list"
tar -xzf "$work"/*.tar.gz -C "$work" --strip-components=1

# With these a build in another folder, or of another clone, finds its objects
# in the compiler cache; the namespace keeps CPUs apart, as the command line
# says "native" for all of them.
export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
export CCACHE_NAMESPACE=${cpu:0:16}

quietly cmake -S "$work/vendor/llama.cpp" -B "$work/build" -G Ninja \
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
  -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_RPATH='$ORIGIN' \
  -DGGML_RPC=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_MTMD=OFF
quietly cmake --build "$work/build"
quietly cmake --install "$work/build" --prefix "$work/install"
printf '%s\n' "$recipe" >"$work/install/installed.txt"

rm -rf "$prefix.old"
if [[ -e $prefix ]]; then mv -T "$prefix" "$prefix.old"; fi
mv -T "$work/install" "$prefix"
rm -rf "$prefix.old"
