"""The work of tools/peer_reference; see there."""

import argparse
import ctypes
import json
import statistics
import sys
import time
import types

import mlx.core as mx
import numpy as np
from veloxquant_mlx.cache.qfilters_cache import QFiltersKVCache

HEADS, DIM, SINKS, RECENT = 8, 128, 4, 64
FLOAT16 = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        *((name, ctypes.c_size_t) for name in ("b", "h", "t", "d")),
        *((name, ctypes.c_ssize_t) for name in ("of_b", "of_h", "of_t")),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *(
            (name, ctypes.c_int64)
            for name in (
                "budget",
                "n_sink",
                "recent",
                "interval",
                "calib_tokens",
                "sign",
            )
        ),
        ("min_retention", ctypes.c_double),
        ("on_low_retention", ctypes.c_int32),
    ]


class Ours:
    """One layer, through the C API."""

    def __init__(self, library, filters, budget, interval):
        self.library = library
        library.qf_last_error.restype = ctypes.c_char_p
        library.qf_tensor_dense.restype = Tensor
        bank = ctypes.c_void_p()
        self.call(
            "qf_filters_create",
            filters.ctypes.data_as(ctypes.c_void_p),
            *map(ctypes.c_size_t, (1, HEADS, DIM)),
            None,
            None,
            ctypes.byref(bank),
        )
        config = Config()
        size = ctypes.c_size_t(ctypes.sizeof(config))
        self.call("qf_config_init", ctypes.byref(config), size)
        config.budget, config.n_sink, config.recent = budget, SINKS, RECENT
        config.interval, config.min_retention = interval, 0
        self.cache = ctypes.c_void_p()
        self.call(
            "qf_cache_create",
            ctypes.byref(config),
            bank,
            ctypes.c_size_t(0),
            ctypes.byref(self.cache),
        )
        library.qf_filters_free(bank)

    def __del__(self):
        self.library.qf_cache_free(self.cache)

    def call(self, name, *arguments):
        if getattr(self.library, name)(*arguments) != 0:
            sys.exit(f"peer_reference: {self.library.qf_last_error()}")

    def view(self, rows):
        return self.library.qf_tensor_dense(
            rows.ctypes.data_as(ctypes.c_void_p),
            FLOAT16,
            *map(ctypes.c_size_t, rows.shape),
        )

    def update(self, keys, values, name="qf_cache_update"):
        k, v = self.view(keys), self.view(values)
        start = time.perf_counter()
        self.call(name, self.cache, ctypes.byref(k), ctypes.byref(v))
        self.call("qf_cache_settle", self.cache)
        return time.perf_counter() - start

    def kept(self):
        out = []
        for head in range(HEADS):
            size = ctypes.c_size_t()
            group = ctypes.c_size_t(head)
            ask = (self.cache, group, None, ctypes.c_size_t(0))
            self.call("qf_cache_positions", *ask, ctypes.byref(size))
            rows = np.empty(size.value, np.int32)
            self.call(
                "qf_cache_positions",
                self.cache,
                group,
                rows.ctypes.data_as(ctypes.c_void_p),
                size,
                ctypes.byref(size),
            )
            out.append(rows)
        return np.stack(out)


class Theirs:
    def __init__(self, filters, budget):
        config = types.SimpleNamespace(
            qfilters_budget=budget,
            qfilters_n_sink=SINKS,
            qfilters_recent=RECENT,
            qfilters_min_retention=None,
        )
        self.cache = QFiltersKVCache(config, filters=mx.array(filters))

    def update(self, keys, values):
        k, v = mx.array(keys), mx.array(values)
        mx.eval(k, v)
        start = time.perf_counter()
        returned = self.cache.update_and_fetch(k, v)
        mx.eval(*returned, self.cache.keys, self.cache.values)
        return time.perf_counter() - start

    def kept(self):
        return np.array(self.cache._positions)[0]


def decode(library, random, filters, budget, steps):
    """Median seconds of a step: theirs, ours, ours evicting every 64."""
    rows = random.standard_normal((2, 1, HEADS, budget, DIM))
    keys, values = rows.astype(np.float16)
    theirs, ours = Theirs(filters, budget), Ours(library, filters, budget, 0)
    spread = Ours(library, filters, budget, 64)
    for cache in (theirs, ours, spread):
        cache.update(keys, values)
    times = [[], [], []]
    for _ in range(steps):
        one = random.standard_normal((2, 1, HEADS, 1, DIM)).astype(np.float16)
        times[0].append(theirs.update(*one))
        times[1].append(ours.update(*one))
        # Evictions come every 64 steps: take all of them.
        times[2] += [spread.update(*one) for _ in range(64)]
    same = np.array_equal(theirs.kept(), ours.kept())
    return (
        statistics.median(times[0]),
        statistics.median(times[1]),
        statistics.fmean(times[2]),
        same,
    )


def prefill(library, random, filters, tokens, budget, repeats):
    """Median seconds: theirs, ours, ours borrowing its inputs as theirs do."""
    rows = random.standard_normal((2, 1, HEADS, tokens, DIM))
    keys, values = rows.astype(np.float16)
    times, same = [[], [], []], True
    for _ in range(repeats):
        theirs = Theirs(filters, budget)
        ours = Ours(library, filters, budget, 0)
        lent = Ours(library, filters, budget, 0)
        times[0].append(theirs.update(keys, values))
        times[1].append(ours.update(keys, values))
        times[2].append(lent.update(keys, values, "qf_cache_update_borrowed"))
        for cache in (ours, lent):
            same = same and np.array_equal(theirs.kept(), cache.kept())
    return (*map(statistics.median, times), same)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    library = ctypes.CDLL(arguments.library)
    random = np.random.default_rng(1)
    filters = random.standard_normal((HEADS, DIM)).astype(np.float32)
    theirs, ours, spread, same = decode(library, random, filters, 4096, 20)
    long_theirs, long_ours, long_lent, long_same = prefill(
        library, random, filters, 8192, 512, 5
    )
    print(f"{'one layer, 8 heads of 128':<34} {'reference':>10} {'ours':>10}")

    def row(name, a, b):
        print(f"{name:<34} {a * 1e3:>7.2f} ms {b * 1e3:>7.3f} ms {a / b:>7.0f}x")

    row("decode, budget 4,096", theirs, ours)
    row("decode, evicting every 64 steps", theirs, spread)
    row("prefill, 8,192 to 512", long_theirs, long_ours)
    row("prefill, inputs borrowed", long_theirs, long_lent)
    print(f"the same rows kept: {'yes' if same and long_same else 'NO'}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {
                    "decode_seconds": [theirs, ours, spread],
                    "prefill_seconds": [long_theirs, long_ours, long_lent],
                    "same_rows": bool(same and long_same),
                },
                file,
            )
    return 0 if same and long_same else 1


if __name__ == "__main__":
    sys.exit(main())
