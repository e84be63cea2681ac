"""The work of tools/peer_openvino; see there."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

ROWS = 512
# What we want of ours against OpenVINO: (name, key, at least or at most).
WANTED = [
    ("prefill, tokens/s", "prefill", ">=", 1.5),
    ("decode, tokens/s", "decode", ">=", 1.5),
    ("peak memory, MiB", "memory", "<=", 0.5),
]


def pipeline(model, **properties):
    # Not at the top: the process that compares must stay small, as a child's
    # peak memory starts with its parent's.
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB, touched as needed
    scheduler.use_cache_eviction = True
    scheduler.cache_eviction_config = genai.CacheEvictionConfig(
        start_size=32,
        recent_size=128,
        max_cache_size=ROWS,
        aggregation_mode=genai.AggregationMode.SUM,
    )
    return genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, **properties
    )


def convert(options):
    """Writes the model and its tokenizer beside the GGUF."""
    pipeline(options.gguf, enable_save_ov_model=True)


def first_tokens(tokenizer, path, count):
    """Line by line: one call returns no more than the model's 8,192 tokens."""
    tokens = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            encoded = tokenizer.encode(line, add_special_tokens=False)
            tokens.extend(encoded.input_ids.data[0].tolist())
            if len(tokens) >= count:
                return tokens[:count]
    sys.exit(f"peer_openvino: the text has {len(tokens)} tokens")


def run_openvino(options):
    """One run in this process; speeds as JSON to options.out."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipe = pipeline(options.model, INFERENCE_NUM_THREADS=1)
    tokens = first_tokens(pipe.get_tokenizer(), options.text, options.tokens)
    tokens = np.array([tokens], np.int64)
    prompt = genai.TokenizedInputs(
        ov.Tensor(tokens), ov.Tensor(np.ones_like(tokens))
    )
    config = genai.GenerationConfig()
    config.max_new_tokens = options.decode + 1  # the prefill gives the first
    config.ignore_eos = True
    config.do_sample = False
    metrics = pipe.generate(prompt, config).perf_metrics
    made = metrics.get_num_generated_tokens()
    if made != options.decode + 1:
        sys.exit(f"peer_openvino: it made {made} tokens")
    result = {
        "prefill": options.tokens / metrics.get_ttft().mean * 1e3,
        "decode": 1e3 / metrics.get_tpot().mean,
        "version": genai.get_version(),
    }
    with open(options.out, "w") as file:
        json.dump(result, file)


def measure(command):
    """Runs `command FILE`; the JSON it writes there, and its peak in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        child = subprocess.Popen([*command, out], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"peer_openvino: failed: {' '.join(command)}")
        with open(out) as file:
            return json.load(file), usage.ru_maxrss / 1024


def measure_openvino(options):
    command = [sys.executable, __file__, "run", "--model", options.model]
    command += ["--text", options.text, "--tokens", str(options.tokens)]
    command += ["--decode", str(options.decode), "--out"]
    found, memory = measure(command)
    return found | {"memory": memory}


def measure_ours(options):
    command = [options.qfilters, "bench", "decode", "--model", options.gguf]
    command += ["--text", options.text, "--filters", options.filters]
    command += ["--policy", "auto", "--budget", str(ROWS)]
    command += ["--contexts", str(options.tokens), "--threads", "1"]
    command += ["--decode", str(options.decode), "--json"]
    found, memory = measure(command)
    speeds = found["runs"][0]["points"][0]["tokens_per_second"]
    return speeds | {"memory": memory}


def best(runs):
    out = {
        key: max(run[key] for run in runs) for key in ("prefill", "decode")
    }
    return out | {"memory": min(run["memory"] for run in runs)}


def compare(options):
    runs = {"openvino": [], "ours": []}
    for _ in range(options.rounds):
        runs["openvino"].append(measure_openvino(options))
        runs["ours"].append(measure_ours(options))
    theirs, ours = best(runs["openvino"]), best(runs["ours"])
    version = runs["openvino"][0]["version"]
    print(f"OpenVINO GenAI {version}")
    print(
        f"{options.tokens:,} tokens, then {options.decode} one by one, "
        f"{ROWS} rows, 1 thread, best of {options.rounds}"
    )
    print(f"{'':<20} {'OpenVINO':>9} {'ours':>9} {'ratio':>6}  wanted")
    for name, key, direction, bound in WANTED:
        ratio = ours[key] / theirs[key]
        holds = ratio >= bound if direction == ">=" else ratio <= bound
        print(
            f"{name:<20} {theirs[key]:>9.1f} {ours[key]:>9.1f} {ratio:>6.2f}  "
            f"{direction} {bound}: {'holds' if holds else 'does not hold'}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(runs, file, indent=2)


def arguments():
    parser = argparse.ArgumentParser(prog="peer_openvino")
    modes = parser.add_subparsers(required=True)
    mode = modes.add_parser("convert")
    mode.set_defaults(do=convert)
    mode.add_argument("gguf")
    mode = modes.add_parser("run")
    mode.set_defaults(do=run_openvino)
    for name in ("--model", "--text", "--out"):
        mode.add_argument(name, required=True)
    for name in ("--tokens", "--decode"):
        mode.add_argument(name, type=int, required=True)
    mode = modes.add_parser("compare")
    mode.set_defaults(do=compare)
    for name in ("--qfilters", "--gguf", "--model", "--filters", "--text"):
        mode.add_argument(name, required=True)
    mode.add_argument("--tokens", type=int, default=8000)
    mode.add_argument("--decode", type=int, default=64)
    mode.add_argument("--rounds", type=int, default=3)
    mode.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    options.do(options)
