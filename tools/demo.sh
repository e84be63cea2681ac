#!/usr/bin/env bash
# The main job on a real model, start to end: finds the filters of SmolLM2 from
# one part of a book, predicts another part of it with llama.cpp's own cache,
# with our full cache and with bounded ones, and lets the model write from a
# bounded cache. Leaves filters and figures in build/demo/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

qfilters=$ROOT/build/release/bin/qfilters
model=$ROOT/assets/smollm2-135m-instruct-q8_0.gguf
text=$ROOT/assets/handbook.txt
demo=$ROOT/build/demo
filters=$demo/smollm2.npz

[[ -x $qfilters ]] || die "no ${qfilters#"$ROOT/"}: run \`make build\` first"
[[ -f $model && -f $text ]] || die "no model or text: run \`make assets\` first"
mkdir -p "$demo"

# Tokens of the book that are predicted come first, the others far behind.
# Passages as long as the text to come: filters depend on positions.
say "finding the filters of the model, once"
"$qfilters" calibrate --model "$model" --text "$text" \
  --skip 20000 --tokens 8192 --context 4096 \
  --out "$filters" --out "$demo/smollm2.safetensors"

say "predicting 4,096 other tokens, each cache in a process of its own"
"$qfilters" eval perplexity --model "$model" --text "$text" \
  --filters "$filters" --tokens 4096 --policy llama,full,auto \
  --budget 1024,512 --json "$demo/perplexity.json" |
  tee "$demo/perplexity.txt"

say "writing on from the first pages, 256 rows a head"
head -n 25 "$text" | "$qfilters" generate --model "$model" \
  --prompt-file - --filters "$filters" --budget 256 -n 120 --seed 3
