"""What the command line does with a real model.

QFILTERS=build/release/bin/qfilters python3 cli_run_test.py
"""

import csv
import json
import os
import signal
import struct
import sys

import cli_case
from cli_case import (
    OF_TEXT,
    ON_MODEL,
    PROMPT,
    TEXT,
    TIMEOUT,
    CliTest,
    catches,
    filters,
    make_filters,
    with_filters,
    wait_until,
)

ROW_BYTES = 30 * 3 * (64 + 64) * 2  # one row of every head, SmolLM2-135M


class CalibrateTest(CliTest):
    def calibrate(self, *outs, policy="qfilters", words=""):
        more = [word for out in outs for word in ("--out", out)]
        return self.run_ok(
            f"calibrate --policy {policy} --tokens 200 --context 128 " + words,
            *ON_MODEL,
            *OF_TEXT,
            *more,
        )

    def test_makes_the_filters_of_the_other_tests(self):
        for policy in ("auto", "qfilters", "expected", "squeeze"):
            self.assertTrue(os.path.exists(make_filters(policy)))

    def test_gives_the_same_bytes_twice_and_the_same_in_every_format(self):
        one = self.folder / "one.npz"
        two = self.folder / "two.safetensors"
        three = self.folder / "three.gguf"
        again = self.folder / "again.npz"
        # Passages of 128 and 72 tokens, two kinds without 8 sinks each; one
        # without their last eighths.
        for policy, dim, samples in (
            ("qfilters", 64, 200),
            ("auto", 260, 159),
            ("expected", 6560, 184),
            ("squeeze", 1, 200),
        ):
            text, _, result = self.calibrate(one, two, three, policy=policy)
            self.assertIn(f"30 layers of 3 heads of {dim}", text)
            self.calibrate(again, policy=policy)
            self.assertEqual(one.read_bytes(), again.read_bytes())
            self.assertEqual(result["n_samples"], samples)
            self.assertEqual(result["dataset"], "handbook.txt")
            for out in (one, two, three):
                _, _, seen = self.run_ok("inspect", out)
                self.assertEqual(seen["policy"], policy)
                self.assertEqual(seen["fingerprint"], result["fingerprint"])
                self.assertEqual(
                    seen["metadata"]["text_hash"], result["text_hash"]
                )
                self.assertEqual(seen["warnings"], [])

    def test_chunks_change_filters_by_rounding_only(self):
        values = []
        for chunk in (64, 128):
            out = self.folder / "f.safetensors"
            self.calibrate(out, words=f"--chunk {chunk}")
            raw = out.read_bytes()
            begin = 8 + struct.unpack("<Q", raw[:8])[0]
            values.append(struct.unpack(f"<{30 * 3 * 64}f", raw[begin:]))
        self.assertLess(max(abs(a - b) for a, b in zip(*values)), 1e-5)

    def test_inspect_shows_what_a_file_is_of(self):
        text, _, result = self.run_ok("inspect", filters())
        for part in ("handbook.txt", "attention", "512 per", "mean norm"):
            self.assertIn(part, text)
        self.assertEqual(len(result["layers"]), 30)
        self.assertEqual(result["warnings"], [])
        for layer in result["layers"]:
            self.assertAlmostEqual(layer["mean_norm"], 1, places=5)

    def test_inspect_warns_of_what_a_file_lacks(self):
        path = self.folder / "foreign.safetensors"
        tensor = {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [0, 8]}
        header = json.dumps({"q_filters": tensor}).encode()
        size = struct.pack("<Q", len(header))
        path.write_bytes(size + header + struct.pack("<2f", 3, 4))
        text, _, result = self.run_ok("inspect", path)
        for part in (
            "layer 0: norms from 5.0000",
            "model unknown",
            "query site unknown",
        ):
            self.assertIn(part, "\n".join(result["warnings"]))
            self.assertIn(part, text)


class GenerateTest(CliTest):
    def bounded(self, words):
        return self.generate(
            "--policy qfilters --interval 4 --ignore-eos " + words,
            *with_filters(),
            "--prompt",
            PROMPT,
        )

    def test_repeats_itself_with_a_seed_and_any_threads(self):
        # Two threads on a busy machine are slow: few tokens, early evictions.
        def text(words):
            return self.bounded("-n 24 --budget 16 --recent 8 " + words)[0]

        first = text("--seed 7")
        self.assertEqual(text("--seed 7"), first)
        self.assertEqual(text("--seed 7 --threads 2"), first)
        self.assertNotEqual(text("--seed 8"), first)

    def test_positions_rise_by_one_over_many_evictions(self):
        for tokens in (90, 91):
            text, result = self.bounded(f"-n {tokens} --budget 48")
            self.check_run(result)
            self.assertGreaterEqual(result["evictions"], 10)
            self.assertEqual(result["generated_tokens"], tokens)
            self.assertEqual(result["prompt_tokens"], 12)
            # The last token was given out and need not enter the cache.
            self.assertEqual(result["offset"], 12 + tokens - 1)
            self.assertLessEqual(result["rows_kept_max"], 48 + 4)
            self.assertEqual(result["stop"], "length")
            self.assertEqual(text, result["text"] + "\n")

    def test_holds_no_more_rows_than_budget_interval_and_chunk(self):
        prompt = self.folder / "prompt.txt"
        with open(TEXT) as text:
            prompt.write_text(text.read(4000))
        _, result = self.generate(
            "--policy qfilters --budget 192 --interval 64 --chunk 128 -n 4",
            *with_filters(),
            "--prompt-file",
            prompt,
        )
        offset = result["offset"]
        self.assertGreater(offset, 700)
        kv_bytes = result["kv_bytes"]
        # llama.cpp pads its own part, one micro-batch, to 256 rows.
        self.assertLessEqual(kv_bytes["peak"], (192 + 64 + 256) * ROW_BYTES)
        self.assertEqual(kv_bytes["full"], offset * ROW_BYTES)

    def test_int8_rows_take_about_half_the_memory(self):
        words = "-n 4 --policy full --chunk 128"
        _, same = self.generate(words, "--prompt", PROMPT)
        _, int8 = self.generate(
            words + " --cache-type int8", "--prompt", PROMPT
        )
        self.assertEqual(same["cache_type"], "f16")
        self.assertEqual(int8["cache_type"], "int8")
        # A head's row: 64 + 64 elements, and two float32 scales.
        self.assertEqual(same["kv_bytes"]["full"] % 256, 0)
        self.assertEqual(
            int8["kv_bytes"]["full"] * 256, same["kv_bytes"]["full"] * 136
        )
        self.assertLess(int8["kv_bytes"]["peak"], same["kv_bytes"]["peak"])

    def test_takes_budgets_in_three_forms(self):
        for budget, rows in (("40", 40), ("50%", 10), ("10MiB", 128)):
            _, result = self.generate(
                f"-n 8 --policy streaming --budget {budget}",
                "--prompt",
                PROMPT,
            )
            self.assertEqual(result["budget"], rows)
            self.assertEqual(result["recent"], 0)
            self.assertLessEqual(result["kv_bytes"]["peak"], 10 << 20)

    def test_heads_that_share_a_budget_stay_within_its_memory(self):
        prompt = self.folder / "prompt.txt"
        with open(TEXT) as text:
            prompt.write_text(text.read(4000))
        for interval in ("", "--interval 0 "):
            _, result = self.generate(
                f"{interval}--budget 12MiB --chunk 64 -n 8",
                *with_filters(),
                "--prompt-file",
                prompt,
            )
            self.assertGreater(result["rows_kept_max"], result["budget"])
            peak = result["kv_bytes"]["peak"]
            self.assertLessEqual(peak, 12 << 20)
            self.assertGreater(peak, 9 << 20)

    def test_every_policy_generates(self):
        for policy in (
            "llama",
            "full",
            "auto",
            "qfilters",
            "streaming",
            "knorm",
            "random",
        ):
            text, result = self.generate(
                f"-n 6 --budget 16 --policy {policy}",
                *with_filters(),
                "--prompt",
                PROMPT,
            )
            self.assertEqual(result["policy"], policy)
            bounded = policy not in ("llama", "full")
            self.assertEqual(result["budget"], 16 if bounded else None)
            self.assertGreater(len(text), 1)

    def test_shares_the_budget_of_auto_among_heads(self):
        prompt = self.folder / "prompt.txt"
        with open(TEXT) as text:
            prompt.write_text(text.read(2000))
        _, result = self.generate(
            "--budget 64 --interval 0 --chunk 64 -n 4",
            *with_filters(),
            "--prompt-file",
            prompt,
        )
        self.assertEqual(result["policy"], "auto")
        self.assertEqual(result["rule"], "shared")
        self.assertEqual(result["recent"], 16)
        self.assertAlmostEqual(result["rows_kept"], 64)
        self.assertLess(result["rows_kept_min"], 64)
        self.assertGreater(result["rows_kept_max"], 64)

    def test_merges_values_of_rows_that_go(self):
        prompt = self.folder / "prompt.txt"
        with open(TEXT) as text:
            prompt.write_text(text.read(2000))
        said = {}
        for words in (
            "--policy h2o",
            "--policy cam",
            "--policy h2o --merge cam",
            "--policy cam --merge none",
            "--policy knorm",
            "--policy knorm --merge cam",
        ):
            said[words], result = self.generate(
                "--budget 64 --chunk 64 -n 12 " + words,
                "--prompt-file",
                prompt,
            )
            wanted = "cam" if words.endswith("cam") else "none"
            self.assertEqual(result["merge"], wanted)
        self.assertEqual(said["--policy h2o"], said["--policy cam --merge none"])
        self.assertEqual(said["--policy cam"], said["--policy h2o --merge cam"])
        self.assertNotEqual(said["--policy cam"], said["--policy h2o"])
        self.assertNotEqual(
            said["--policy knorm --merge cam"], said["--policy knorm"]
        )

    def test_reads_a_prompt_from_stdin(self):
        words = "-n 8 --policy full"
        piped, _ = self.generate(words + " --prompt-file -", stdin=PROMPT)
        given, _ = self.generate(words, "--prompt", PROMPT)
        self.assertEqual(piped, given)

    def test_the_summary_goes_to_stderr_only(self):
        text, summary, _ = self.run_ok(
            "generate -n 4 --policy full", *ON_MODEL, "--prompt", PROMPT
        )
        for part in (
            "tokens seen",
            "rows kept",
            "KV cache",
            "first token",
            "tokens/s",
            "time in",
            "peak memory",
        ):
            self.assertIn(part, summary)
            self.assertNotIn(part, text)


class ChatTest(CliTest):
    def chat(self, stdin, words):
        return self.generate("--chat --policy full " + words, stdin=stdin)

    def test_carries_the_cache_over_and_closes_each_turn(self):
        one, first = self.chat("Hello there\n", "-n 8")
        two, both = self.chat("Hello there\n\nHello there\n", "-n 8")
        self.assertEqual((first["turns"], both["turns"]), (1, 2))
        self.assertTrue(two.startswith(one))
        # The second turn adds its own part and the end of the first answer,
        # <|im_end|> and a line break. An answer that was cut off has besides
        # one token that was given out and is not in the cache.
        cut_off = 1 if first["generated_tokens"] == 8 else 0
        self.assertEqual(
            both["prompt_tokens"], 2 * first["prompt_tokens"] + 2 + cut_off
        )
        self.assertEqual(both["stop"], "input_ended")

    def test_ends_an_answer_at_the_models_end_token(self):
        text, result = self.chat(
            "What is the capital of France?\n", "--temp 0 -n 60"
        )
        generated = result["generated_tokens"]
        self.assertLess(generated, 60)
        self.assertEqual(result["prompt_tokens"] + generated, result["offset"])
        self.assertIn("Paris", text)
        self.assertNotIn("<|", text)


class InterruptTest(CliTest):
    def test_ends_generation_cleanly(self):
        process = self.start(
            "generate -n 100000 --ignore-eos --policy streaming --budget 64",
            *ON_MODEL,
            "--prompt",
            PROMPT,
        )
        process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn("stopped: interrupted", errors.decode())
        result = json.loads(self.json.read_text())
        self.assertEqual(result["stop"], "interrupted")
        self.assertGreater(result["generated_tokens"], 4)

    def test_ends_a_prefill_cleanly(self):
        process = self.start(
            "generate --chunk 32 --policy streaming --budget 64",
            *ON_MODEL,
            "--prompt-file",
            TEXT,
        )
        wait_until(
            lambda: catches(process.pid, signal.SIGINT), "the prefill begins"
        )
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 0, errors)
        self.assertEqual(output, b"")
        result = json.loads(self.json.read_text())
        self.assertEqual(result["stop"], "interrupted")
        self.assertEqual(result["offset"], result["prompt_tokens"])

    def test_kills_when_repeated(self):
        # One step of thousands of tokens: the second signal comes within it.
        process = self.start(
            "generate --chunk 4096 --policy streaming",
            *ON_MODEL,
            "--prompt-file",
            TEXT,
        )

        def caught():
            return catches(process.pid, signal.SIGINT)

        wait_until(caught, "the prefill begins")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not caught(), "the first signal is noted")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, -signal.SIGINT)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_leaves_no_file_of_an_evaluation(self):
        temporary = self.folder / "tmp"
        temporary.mkdir()
        process = self.start(
            "eval perplexity --policy full,llama",
            *ON_MODEL,
            *OF_TEXT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        wait_until(lambda: list(temporary.iterdir()), "the first run begins")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(errors.decode(), "qfilters: eval: interrupted\n")
        self.assertEqual(output, b"")
        self.assertEqual(list(temporary.iterdir()), [])
        self.assertFalse(self.json.exists())


class EvalTest(CliTest):
    def perplexity(self, words, tokens=128, env=None):
        table, _, result = self.run_ok(
            f"eval perplexity --tokens {tokens} --decode 4 --chunk 64 " + words,
            *ON_MODEL,
            *OF_TEXT,
            *with_filters(),
            env=env,
        )
        self.assertEqual(result["task"], "perplexity")
        for each in result["runs"]:
            self.check_run(each)
        return table, result["runs"]

    def test_int8_rows_cost_next_to_nothing(self):
        words = "--policy full --cache-type "
        _, (same,) = self.perplexity(words + "f16", tokens=320)
        _, (int8,) = self.perplexity(words + "int8", tokens=320)
        self.assertNotEqual(int8["mean_nll"], same["mean_nll"])
        self.assertLess(abs(int8["mean_nll"] - same["mean_nll"]), 0.02)

    def test_our_full_cache_agrees_with_llama(self):
        _, (llama, full) = self.perplexity("--policy llama,full", tokens=320)
        self.assertEqual(llama["predictions"], 320 - 1 - 159)
        self.assertEqual(full["predictions"], llama["predictions"])
        self.assertLess(abs(full["mean_nll"] - llama["mean_nll"]), 0.01)

    def test_an_isa_that_is_asked_for_is_run_and_recorded(self):
        words = "--policy qfilters --budget 64"
        env = {**os.environ, "QFILTERS_ISA": "scalar"}
        _, (plain,) = self.perplexity(words, env=env)
        _, (best,) = self.perplexity(words, env={**env, "QFILTERS_ISA": ""})
        self.assertEqual(plain["isa"], "scalar")
        self.assertAlmostEqual(plain["mean_nll"], best["mean_nll"], places=2)

    def test_a_budget_over_everything_changes_nothing(self):
        _, (full, bounded) = self.perplexity(
            "--policy full,qfilters --budget 132"
        )
        self.assertEqual(full["perplexity"], bounded["perplexity"])
        self.assertEqual(bounded["rows_kept"], 132)
        self.assertEqual(bounded["evictions"], 0)

    def test_runs_each_policy_with_each_budget(self):
        temporary = self.folder / "tmp"
        temporary.mkdir()
        table, runs = self.perplexity(
            "--policy full,streaming,random --budget 32,25%",
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        self.assertEqual(
            [(each["policy"], each["budget"]) for each in runs],
            [
                ("full", None),
                ("streaming", 32),
                ("streaming", 33),
                ("random", 32),
                ("random", 33),
            ],
        )
        self.assertEqual(len(table.splitlines()), 6)
        self.assertEqual(list(temporary.iterdir()), [])

    def test_gives_the_same_alone_and_among_others(self):
        _, (alone,) = self.perplexity("--policy knorm --budget 32")
        _, (_, among) = self.perplexity("--policy full,knorm --budget 32")
        self.assertEqual(alone["perplexity"], among["perplexity"])
        self.assertGreater(alone["evictions"], 0)

    def test_a_needle_is_found_in_the_full_cache(self):
        table, _, result = self.run_ok(
            "eval needle --policy full,streaming --budget 64"
            " --lengths 256 --depths 30 --keys 58291,40716",
            *ON_MODEL,
            *OF_TEXT,
        )
        self.assertEqual(result["task"], "needle")
        full, streaming = result["runs"]
        for each in (full, streaming):
            self.check_run(each)
            self.assertEqual(
                [
                    (cell["length"], cell["depth"], cell["key"])
                    for cell in each["cells"]
                ],
                [(256, 30, "58291"), (256, 30, "40716")],
            )
        self.assertEqual(full["accuracy"], 1)
        self.assertLess(full["mean_nll"], 0.5)
        self.assertEqual(streaming["accuracy"], 0)
        self.assertEqual(full["query"], "agnostic")
        self.assertIn("accuracy", table)

    def test_needles_of_other_subjects_hide_in_other_texts(self):
        _, _, result = self.run_ok(
            "eval needle --policy full --lengths 128 --depths 50"
            " --keys 58291 --phrasings 2,6 --skips 0,3000",
            *ON_MODEL,
            *OF_TEXT,
        )
        (full,) = result["runs"]
        self.assertEqual(
            [(cell["skip"], cell["phrasing"]) for cell in full["cells"]],
            [(0, 2), (0, 6), (3000, 2), (3000, 6)],
        )
        losses = {cell["nll_per_token"] for cell in full["cells"]}
        self.assertEqual(len(losses), 4)
        self.assertEqual(full["accuracy"], 1)


class RulerTest(CliTest):
    def ruler(self, words, *more):
        table, _, result = self.run_ok(
            "eval ruler --lengths 512 --chunk 64 " + words,
            *more,
            *ON_MODEL,
            *OF_TEXT,
        )
        self.assertEqual(result["task"], "ruler")
        for each in result["runs"]:
            self.check_run(each)
            self.assertEqual(each["query"], "agnostic")
        return table, result["runs"]

    def test_tells_policies_apart_and_writes_both_layouts(self):
        kvpress, theirs = self.folder / "kvpress", self.folder / "a" / "ruler"
        table, (full, streaming) = self.ruler(
            "--tasks niah_single_1,vt --samples 2 --seed 3"
            " --policy full,streaming --budget 64",
            "--kvpress",
            kvpress,
            "--ruler-out",
            theirs,
        )
        for each in (full, streaming):
            self.assertEqual(
                [
                    (cell["task"], cell["length"], cell["sample"])
                    for cell in each["cells"]
                ],
                [
                    ("niah_single_1", 512, 0),
                    ("niah_single_1", 512, 1),
                    ("vt", 512, 0),
                    ("vt", 512, 1),
                ],
            )
            scores = [each["tasks"][task]["score"] for task in each["tasks"]]
            self.assertAlmostEqual(each["score"], sum(scores) / 2)
            self.assertEqual(
                [mean["score"] for mean in each["means"]], scores
            )
        self.assertEqual(full["tasks"]["niah_single_1"]["score"], 1)
        self.assertLess(streaming["tasks"]["niah_single_1"]["score"], 1)
        self.assertLess(full["mean_nll"], streaming["mean_nll"])
        self.assertIn("niah_single_1", table)

        folders = sorted(path.name for path in kvpress.iterdir())
        self.assertEqual(len(folders), 2)
        self.assertRegex(folders[0], r"^ruler__512__.*__full__0\.00$")
        self.assertRegex(folders[1], r"^ruler__512__.*__streaming__0\.88$")
        metrics = json.loads((kvpress / folders[0] / "metrics.json").read_text())
        self.assertEqual(metrics["niah_single_1"], {"string_match": 100})
        with open(kvpress / folders[1] / "predictions.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(
            [row["predicted_answer"] for row in rows],
            [cell["prediction"] for cell in streaming["cells"]],
        )
        for row in rows:
            self.assertGreater(float(row["compression_ratio"]), 0.5)
        lines = (theirs / "streaming-64" / "512" / "vt.jsonl").read_text()
        for index, line in enumerate(lines.splitlines()):
            sample = json.loads(line)
            self.assertEqual(sample["index"], index)
            self.assertLessEqual(sample["length"], 512)
            for output in sample["outputs"]:
                self.assertIn(output, sample["input"])
        summary = (theirs / "full" / "512" / "summary.csv").read_text()
        self.assertIn("Tasks,niah_single_1,vt\nScore,100.00,", summary)

    def test_the_same_seed_gives_the_same_and_llama_can_be_asked(self):
        words = "--tasks niah_single_2 --policy "
        _, (ours,) = self.ruler(words + "full")
        _, (again,) = self.ruler(words + "full")
        _, (other,) = self.ruler(words + "full --seed 1")
        _, (llama,) = self.ruler(words + "llama")
        self.assertEqual(ours["cells"], again["cells"])
        self.assertNotEqual(
            ours["cells"][0]["references"], other["cells"][0]["references"]
        )
        self.assertEqual(
            ours["cells"][0]["references"], llama["cells"][0]["references"]
        )
        self.assertAlmostEqual(
            ours["mean_nll"], llama["mean_nll"], delta=0.05
        )


class QuestionsTest(CliTest):
    NOISE = "Rain fell on the roof and nobody looked up. "
    CONTEXT = (
        NOISE + "Mary lives in Oslo. She owns a red bicycle. " + 20 * NOISE
    )
    LINES = (
        {
            "question": "Where does Mary live?",
            "answer_prefix": "Answer: Mary lives in",
            "answers": ["Oslo"],
        },
        {
            "question": "Which colour has the bicycle of Mary?",
            "answer_prefix": "Answer: Mary owns a",
            "answers": ["crimson", "red"],
        },
    )

    def questions(self, words, lines):
        file = self.folder / "q.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        table, _, result = self.run_ok(
            "eval questions --generate 8 --chunk 64 " + words,
            "--file",
            file,
            *ON_MODEL,
        )
        self.assertEqual(result["task"], "questions")
        for each in result["runs"]:
            self.check_run(each)
            self.assertEqual(each["query"], "agnostic")
        return table, result["runs"]

    def test_a_context_is_read_once_and_each_answer_is_as_if_alone(self):
        (self.folder / "c.txt").write_text(self.CONTEXT)
        lines = [
            {**self.LINES[0], "context": self.CONTEXT},
            {**self.LINES[1], "context_file": "c.txt"},
        ]
        for words in ("--policy full", "--policy knorm --budget 96"):
            _, (both,) = self.questions(words, lines)
            alone = [
                self.questions(words, [line])[1][0] for line in lines
            ]
            for cell, single in zip(both["cells"], alone):
                (only,) = single["cells"]
                self.assertEqual({**cell, "line": 1}, only)
            read = [run["tokens"] for run in alone]
            self.assertLess(both["tokens"], sum(read) - 200)
        self.assertEqual(both["cells"][1]["line"], 2)

    def test_policies_differ_in_what_they_recall(self):
        table, (full, streaming, llama) = self.questions(
            "--policy full,streaming,llama --budget 48",
            [{**line, "context": self.CONTEXT} for line in self.LINES],
        )
        self.assertEqual([cell["score"] for cell in full["cells"]], [1, 1])
        self.assertEqual(full["cells"][1]["fraction"], 0.5)
        self.assertEqual(full["score"], 1)
        self.assertEqual(full["fraction"], 0.75)
        self.assertLess(
            full["cells"][0]["nll_per_token"],
            streaming["cells"][0]["nll_per_token"],
        )
        for ours, theirs in zip(full["cells"], llama["cells"]):
            self.assertAlmostEqual(
                ours["nll_per_token"], theirs["nll_per_token"], delta=0.2
            )
        self.assertGreater(
            streaming["cells"][0]["compression_ratio"], 0.5
        )
        self.assertIn("fraction", table)


if __name__ == "__main__":
    sys.exit(cli_case.main())
