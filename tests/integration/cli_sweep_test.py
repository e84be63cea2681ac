"""What `qfilters eval sweep` does with a real model.

QFILTERS=build/release/bin/qfilters python3 cli_sweep_test.py
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import cli_case
from cli_case import (
    OF_TEXT,
    ON_MODEL,
    PROGRAM,
    TIMEOUT,
    CliTest,
    run,
    wait_until,
    with_filters,
)

SHORT = (
    "--chunk 64 --tokens 192 --from 64 --decode 2 "
    "--needle-lengths 128 --depths 50 --keys 58291 "
    "--ruler-tasks niah_single_2 --ruler-lengths 384 "
)


def children(pid):
    """Processes that a process has started and that still run."""
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()]


class SweepTest(CliTest):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "sweep"

    def words(self, words):
        return [
            *f"eval sweep {SHORT}{words}".split(),
            *ON_MODEL,
            *OF_TEXT,
            *with_filters(),
            "--out",
            str(self.out),
        ]

    def sweep(self, words, code=0):
        done = run("", *self.words(words))
        self.assertEqual(done.returncode, code, done.stderr.decode())
        return done.stdout.decode(), done.stderr.decode(), self.stored()

    def stored(self):
        return json.loads((self.out / "sweep.json").read_text())

    def candidates(self, sweep, task):
        runs = sweep["tasks"][task]["runs"]
        return [(each["policy"], each["budget_asked"]) for each in runs]

    def start_sweep(self, words):
        process = subprocess.Popen(
            [PROGRAM, *self.words(words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def wait_for_runs(self, count):
        def there():
            path = self.out / "sweep.json"
            if not path.exists():
                return False
            tasks = self.stored()["tasks"].values()
            return sum(len(task["runs"]) for task in tasks) >= count

        wait_until(there, f"{count} runs are stored")

    def test_runs_every_task_policy_and_budget_once(self):
        text, _, sweep = self.sweep(
            "--tasks perplexity,needle,ruler --policy full,auto --budget 64,25%"
        )
        everything = [("full", None), ("auto", "64"), ("auto", "25%")]
        for task in ("perplexity", "needle", "ruler"):
            self.assertEqual(self.candidates(sweep, task), everything)
            for each in sweep["tasks"][task]["runs"]:
                self.check_run(each)
                rows = each["rows_by_head"]
                self.assertEqual(len(rows), 30)
                self.assertEqual({len(heads) for heads in rows}, {3})
                self.assertEqual(
                    max(max(heads) for heads in rows), each["rows_kept_max"]
                )
            self.assertIn(task, text)
        (needle, *_) = sweep["tasks"]["needle"]["runs"]
        self.assertEqual(len(needle["cells"]), 1)
        self.assertEqual(needle["cells"][0]["length"], 128)
        (ruler, *_) = sweep["tasks"]["ruler"]["runs"]
        self.assertEqual(list(ruler["tasks"]), ["niah_single_2"])
        page = (self.out / "report.html").read_text()
        for part in ("auto 25%", "Needles", "niah_", "Rows by layer"):
            self.assertIn(part, page)

    def test_gives_the_numbers_that_the_task_gives(self):
        _, _, sweep = self.sweep(
            "--tasks perplexity --policy streaming --budget 64"
        )
        _, _, alone = self.run_ok(
            "eval perplexity --chunk 64 --tokens 192 --from 64 --decode 2 "
            "--policy streaming --budget 64",
            *ON_MODEL,
            *OF_TEXT,
        )
        (ours,) = sweep["tasks"]["perplexity"]["runs"]
        (its,) = alone["runs"]
        self.assertEqual(ours["perplexity"], its["perplexity"])
        self.assertEqual(ours["rows_by_head"], its["rows_by_head"])
        self.assertEqual(set(ours), set(its))

    def test_does_not_repeat_what_is_there(self):
        words = "--tasks perplexity --policy full,streaming --budget "
        _, _, first = self.sweep(words + "64")
        text, _, second = self.sweep(words + "64,96")
        self.assertIn("2 of 3 runs are there already", text)
        before = first["tasks"]["perplexity"]["runs"]
        after = second["tasks"]["perplexity"]["runs"]
        self.assertEqual(after[:2], before)  # their seconds too
        self.assertEqual(
            self.candidates(second, "perplexity")[2], ("streaming", "96")
        )

    def test_refuses_to_mix_settings(self):
        words = "--tasks perplexity --policy streaming --budget 64"
        self.sweep(words)
        before = (self.out / "sweep.json").read_bytes()
        done = run("", *self.words(words + " --sink 8"))
        self.assertEqual(done.returncode, 2)
        (line,) = done.stderr.decode().splitlines()
        for part in ("perplexity", "--sink=8", "--out"):
            self.assertIn(part, line)
        self.assertEqual((self.out / "sweep.json").read_bytes(), before)

    def test_goes_on_after_an_interruption(self):
        words = "--tasks perplexity --policy full,streaming,knorm --budget 64"
        process = self.start_sweep(words)
        self.wait_for_runs(1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(errors.decode(), "qfilters: eval: interrupted\n")
        self.assertEqual(output, b"")
        there = self.stored()["tasks"]["perplexity"]["runs"]
        self.assertLess(len(there), 3)
        page = (self.out / "report.html").read_text()
        self.assertIn(f"{3 - len(there)} of 3 runs are missing", page)
        self.assertEqual(
            sorted(each.name for each in self.out.iterdir()),
            ["report.html", "sweep.json"],
        )
        _, _, sweep = self.sweep(words)
        runs = sweep["tasks"]["perplexity"]["runs"]
        self.assertEqual(runs[: len(there)], there)
        self.assertEqual(len(runs), 3)
        page = (self.out / "report.html").read_text()
        self.assertNotIn("are missing", page)

    def test_goes_on_where_a_run_fails(self):
        words = "--tasks perplexity --policy full,streaming --budget 64"
        process = self.start_sweep(words)
        wait_until(lambda: children(process.pid), "a run begins")
        os.kill(children(process.pid)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn("perplexity full failed: killed", errors.decode())
        self.assertIn("1 of 2 runs failed", errors.decode())
        sweep = self.stored()
        self.assertEqual(
            self.candidates(sweep, "perplexity"), [("streaming", "64")]
        )
        (failure,) = sweep["tasks"]["perplexity"]["failures"]
        self.assertEqual(failure["policy"], "full")
        page = (self.out / "report.html").read_text()
        self.assertIn("perplexity full: killed by signal 9", page)
        _, _, sweep = self.sweep(words)  # again, and well this time
        self.assertEqual(sweep["tasks"]["perplexity"]["failures"], [])
        self.assertEqual(len(sweep["tasks"]["perplexity"]["runs"]), 2)

    def test_makes_the_report_again(self):
        self.sweep("--tasks perplexity --policy streaming --budget 64")
        report = self.out / "report.html"
        before = report.read_bytes()
        report.unlink()
        done = run("eval report", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report.read_bytes(), before)

    def test_refuses_what_no_run_can_do_before_the_first(self):
        for words, says in (
            ("--tasks perplexity,dance", ["dance", "perplexity"]),
            ("--tasks perplexity --policy auto,waltz", ["waltz"]),
            ("--tasks perplexity --policy auto --budget 64,2", ["budget"]),
            ("--tasks needle --depths 140", ["depth"]),
            ("--tasks needle --needle-lengths x", ["needle", "lengths"]),
            ("--tasks questions", ["questions", "--file"]),
        ):
            done = run("", *self.words(words))
            lines = done.stderr.decode().splitlines()
            self.assertEqual(done.returncode, 2, lines)
            self.assertEqual(len(lines), 1, lines)
            for part in says:
                self.assertIn(part, lines[0])
            self.assertFalse(self.out.exists(), words)

    def test_refuses_to_share_its_folder_or_replace_its_inputs(self):
        process = self.start_sweep(
            "--tasks perplexity --policy full,streaming,knorm --budget 64"
        )
        self.wait_for_runs(1)
        words = "--tasks perplexity --policy random --budget 64"
        done = run("", *self.words(words))
        self.assertEqual(done.returncode, 2)
        self.assertIn("another one is at work", done.stderr.decode())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        filters = self.folder / "filters.npz"
        filters.write_bytes(pathlib.Path(cli_case.filters()).read_bytes())
        before = filters.read_bytes()
        words = f"--tasks perplexity --policy qfilters --filters {filters} "
        done = run("", *self.words(words + f"--json {filters}"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(filters.read_bytes(), before)

    def test_compares_the_contexts_of_questions(self):
        context = self.folder / "context.txt"
        context.write_text("The gate of the garden is green. " * 30)
        questions = self.folder / "q.jsonl"
        questions.write_text(
            json.dumps(
                {
                    "context_file": "context.txt",
                    "question": "Which colour is the gate?",
                    "answers": ["green"],
                }
            )
        )
        words = f"--tasks questions --file {questions} --generate 2 "
        words += "--policy streaming --budget 64"
        self.sweep(words)
        context.write_text("The gate of the garden is blue. " * 30)
        done = run("", *self.words(words))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("--file", done.stderr.decode())

    def test_refuses_a_folder_without_a_sweep(self):
        self.check_refusal("eval report", self.folder, says=["sweep.json"])
        self.out.mkdir()
        (self.out / "sweep.json").write_text("[1]")
        self.check_refusal("eval report", self.out, says=["not what a sweep"])
        task = {"options": [], "runs": [5], "failures": []}
        sweep = {"settings": {}, "tasks": {"perplexity": task}}
        (self.out / "sweep.json").write_text(json.dumps(sweep))
        self.check_refusal("eval report", self.out, says=["not what a sweep"])
        (self.out / "sweep.json").unlink()
        (self.out / "sweep.json").mkdir()
        self.check_refusal("eval report", self.out, says=["not what a sweep"])


if __name__ == "__main__":
    sys.exit(cli_case.main())
