"""What `qfilters bench` does with a real model.

QFILTERS=build/release/bin/qfilters python3 cli_bench_test.py
"""

import os
import signal
import subprocess
import sys

import cli_case
from cli_case import OF_TEXT, ON_MODEL, TIMEOUT, CliTest, wait_until

DECODE = "bench decode --contexts 48,96 --decode 3 --chunk 32 "


def children_of(pid):
    listed = subprocess.run(
        ["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)],
        stdout=subprocess.PIPE,
    )
    return [int(word) for word in listed.stdout.split()]


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


class BenchTest(CliTest):
    def test_every_candidate_reaches_every_context(self):
        table, _, result = self.run_ok(
            DECODE + "--policy llama,full,streaming --budget 40",
            *ON_MODEL,
            *OF_TEXT,
        )
        runs = result["runs"]
        self.assertEqual(
            [
                (run["policy"], run["budget"], run.get("llama"))
                for run in runs
            ],
            [
                ("llama", None, {"flash_attention": flash, "cache_type": kind})
                for flash, kind in (
                    (False, "f16"),
                    (True, "f16"),
                    (True, "q8_0"),
                )
            ]
            + [("full", None, None), ("streaming", 40, None)],
        )
        for run in runs:
            self.check_run(run)
            self.assertEqual(
                [point["context"] for point in run["points"]], [48, 96]
            )
            self.assertEqual(run["offset"], 99)
            for point in run["points"]:
                self.assertGreater(point["tokens_per_second"]["decode"], 0)
                self.assertGreater(point["tokens_per_second"]["prefill"], 0)
        self.assertGreater(runs[4]["points"][1]["share"]["eviction"], 0)
        # A title, a line for each run and context, the legend.
        self.assertEqual(len(table.splitlines()), 1 + 2 * 5 + 1)

    def test_a_chosen_setting_of_llama_is_the_only_one(self):
        _, _, result = self.run_ok(
            DECODE + "--policy llama --llama-flash-attn on",
            *ON_MODEL,
            *OF_TEXT,
        )
        (run,) = result["runs"]
        self.assertTrue(run["llama"]["flash_attention"])

    def test_contexts_that_do_not_ascend_are_refused(self):
        for contexts, says in (("48,50", "50"), ("x", "whole number")):
            self.check_refusal(
                f"bench decode --decode 3 --contexts {contexts}",
                *ON_MODEL,
                *OF_TEXT,
                says=[says],
            )

    def start_long(self):
        process = self.start(
            "bench decode --contexts 4096 --policy full,streaming --budget 64",
            *ON_MODEL,
            *OF_TEXT,
        )
        wait_until(
            lambda: len(children_of(process.pid)) == 2, "both runs begin"
        )
        return process, children_of(process.pid)

    def test_an_interrupt_ends_all_runs(self):
        process, children = self.start_long()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(errors.decode(), "qfilters: bench: interrupted\n")
        self.assertEqual(output, b"")
        self.assertFalse(any(map(alive, children)))
        self.assertFalse(self.json.exists())

    def test_a_run_that_dies_ends_the_others(self):
        process, children = self.start_long()
        os.kill(children[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1)
        self.assertIn("killed by signal 9", errors.decode())
        self.assertEqual(errors.count(b"\n"), 1)
        self.assertFalse(any(map(alive, children)))

    def test_no_run_outlives_its_parent(self):
        process, children = self.start_long()
        process.kill()
        process.communicate(timeout=TIMEOUT)
        wait_until(lambda: not any(map(alive, children)), "both are gone")


if __name__ == "__main__":
    sys.exit(cli_case.main())
