# Thin: each target is a script or a preset that also runs by itself.
# All are safe to repeat; what is up to date is left alone.
#
# QFILTERS_LLAMA_PREFIX=DIR in the environment: use the llama.cpp installed in
# DIR instead of building one. `make clean` when it changes.

.PHONY: help deps build assets demo test sanitize tsan fuzz bench format tidy
.PHONY: clean

FUZZ_SECONDS ?= 60
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

sanitize:  ## run the tests under the address and undefined sanitizers
	@tools/install_debian.sh
	@cmake --preset sanitize >/dev/null
	@cmake --build --preset sanitize
	@ctest --preset sanitize

tsan:  ## run what starts threads under the thread sanitizer
	@tools/install_debian.sh
	@cmake --preset tsan >/dev/null
	@cmake --build --preset tsan
	@ctest --preset tsan

fuzz:  ## fuzz every reader of foreign bytes, FUZZ_SECONDS=60 each
	@tools/install_debian.sh
	@cmake --preset fuzz >/dev/null
	@cmake --build --preset fuzz
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tools/fuzz.sh

bench: build  ## run the benchmarks
	@build/release/bin/qfilters_bench

format:  ## format the C++ sources in place
	@$(SOURCES) | xargs -r clang-format -i

tidy: deps  ## run clang-tidy on every source
	@cmake --preset dev >/dev/null
	@run-clang-tidy -quiet -p build/dev

clean:  ## remove what was compiled; downloads and assets stay
	@rm -rf build
