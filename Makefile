# Thin: each target is a script or a preset that also runs by itself.
# All are safe to repeat; what is up to date is left alone.
#
# QFILTERS_LLAMA_PREFIX=DIR in the environment: use the llama.cpp installed in
# DIR instead of building one. `make clean` when it changes.

.PHONY: help deps build assets demo test bench format tidy clean

SOURCES = git ls-files -co --exclude-standard -- '*.h' '*.c' '*.cpp'

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

deps:  ## install what is missing: Debian and Python packages, llama.cpp
	@tools/install_debian.sh
	@tools/install_python.sh
	@tools/install_llama.sh

build: deps  ## build everything; programs land in build/release/bin
	@cmake --preset release >/dev/null
	@cmake --build --preset release

assets: build  ## make the models and the text that demo and tests read
	@tools/make_assets.sh

demo: assets  ## calibrate, generate and evaluate on a real model
	@tools/demo.sh

test: assets  ## run every test
	@ctest --preset release

bench: build  ## run the benchmarks
	@build/release/bin/qfilters_bench

format:  ## format the C++ sources in place
	@$(SOURCES) | xargs -r clang-format -i

tidy: deps  ## run clang-tidy on every source
	@cmake --preset dev >/dev/null
	@run-clang-tidy -quiet -p build/dev

clean:  ## remove what was compiled; downloads and assets stay
	@rm -rf build
