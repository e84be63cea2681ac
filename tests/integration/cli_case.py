"""What the tests of the command line share: the program, the model, checks.

A test file ends with `sys.exit(cli_case.main())`. Called with --list it prints
the names of its tests; it exits 77 when all that was asked for was skipped,
which CTest shows as such. Without the model, tests that need it are skipped.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("QFILTERS", str(ROOT / "build/release/bin/qfilters"))
ASSETS = pathlib.Path(os.environ.get("QFILTERS_ASSETS", ROOT / "assets"))
WORK = pathlib.Path(
    os.environ.get(
        "QFILTERS_TEST_WORK",
        pathlib.Path(tempfile.gettempdir()) / "qfilters_cli_test",
    )
)
MODEL = str(ASSETS / "smollm2-135m-instruct-q8_0.gguf")
TEXT = str(ASSETS / "handbook.txt")
ON_MODEL = ["--model", MODEL]
OF_TEXT = ["--text", TEXT]
PROMPT = "The Debian project is an association of individuals who have made"
SKIPPED = 77
TIMEOUT = 240  # of one command; a busy machine is slow

# The keys that the command-line contract promises for every run.
RUN_KEYS = {
    "policy": None,
    "cache_type": None,
    "budget": None,
    "sink": None,
    "recent": None,
    "interval": None,
    "protocol": None,
    "chunk": None,
    "threads": None,
    "isa": None,
    "tokens": None,
    "offset": None,
    "rows_kept": None,
    "rows_kept_min": None,
    "rows_kept_max": None,
    "evictions": None,
    "kv_bytes": {"peak", "full"},
    "seconds": {"prefill", "decode", "attention", "eviction"},
    "tokens_per_second": {"prefill", "decode"},
    "peak_rss_bytes": None,
    "model": {"name", "layers", "kv_heads", "head_dim"},
}


def run(command="", *more, stdin="", stdout=subprocess.PIPE, env=None):
    """Runs the program with the words of `command`, then `more` as it is."""
    return subprocess.run(
        [PROGRAM, *command.split(), *map(str, more)],
        input=stdin.encode(),
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=TIMEOUT,
        env=env,
    )


def make_filters(policy):
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"{policy}.npz"
    words = f"calibrate --policy {policy} --skip 20000 --tokens 512 "
    done = run(words + "--context 256 --out", path, *ON_MODEL, *OF_TEXT)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode())
    return str(path)


def filters(policy="qfilters"):
    path = WORK / f"{policy}.npz"
    return str(path) if path.exists() else make_filters(policy)


def with_filters():
    """For every policy: each takes the filters of its kind."""
    kinds = ("auto", "qfilters", "expected", "squeeze")
    return [word for kind in kinds for word in ("--filters", filters(kind))]


def catches(pid, number):
    """Whether a process has a handler of its own for a signal."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)
    return bool(caught >> (number - 1) & 1)


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain until {what}")
        time.sleep(0.01)


class CliTest(unittest.TestCase):
    needs_model = True

    def setUp(self):
        missing = [each for each in (MODEL, TEXT) if not os.path.exists(each)]
        if self.needs_model and missing:
            self.skipTest(f"no {missing[0]}: run `make assets`")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="qfilters_cli_"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.json = self.folder / "out.json"

    def run_ok(self, command, *more, stdin="", env=None):
        """Stdout, stderr (both strictly UTF-8) and the JSON object."""
        done = run(command, *more, "--json", self.json, stdin=stdin, env=env)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        result = json.loads(self.json.read_text())
        return done.stdout.decode(), done.stderr.decode(), result

    def generate(self, command, *more, stdin=""):
        text, _, result = self.run_ok(
            "generate " + command, *ON_MODEL, *more, stdin=stdin
        )
        return text, result

    def start(self, command, *more, env=None):
        process = subprocess.Popen(
            [PROGRAM, *command.split(), *more, "--json", self.json],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def check_run(self, result):
        for key, inner in RUN_KEYS.items():
            self.assertIn(key, result)
            if inner:
                self.assertLessEqual(inner, set(result[key]))

    def check_refusal(self, command, *more, says, env=None):
        """Exit code 2, one line on stderr, nothing on stdout, no file."""
        before = sorted(self.folder.iterdir())
        done = run(command, *more, env=env)
        lines = done.stderr.decode().splitlines()
        self.assertEqual(done.returncode, 2, lines)
        self.assertEqual(len(lines), 1, lines)
        self.assertTrue(lines[0].startswith("qfilters: "), lines[0])
        for part in says:
            self.assertIn(part, lines[0])
        self.assertEqual(done.stdout, b"")
        self.assertEqual(sorted(self.folder.iterdir()), before)


def names():
    """Class.test_name of every test."""
    for suite in unittest.defaultTestLoader.loadTestsFromModule(
        sys.modules["__main__"]
    ):
        for test in suite:
            yield ".".join(test.id().split(".")[-2:])


def main():
    if sys.argv[1:] == ["--list"]:
        print("\n".join(names()))
        return 0
    program = unittest.main(exit=False)
    if not program.result.wasSuccessful():
        return 1
    all_skipped = len(program.result.skipped) == program.result.testsRun
    return SKIPPED if all_skipped else 0
