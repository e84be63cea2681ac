"""What is kept of one reading: eval fidelity and the protocol one-shot."""

import sys

import cli_case
from cli_case import OF_TEXT, ON_MODEL, CliTest, with_filters


class FidelityTest(CliTest):
    def fidelity(self, words, *more):
        return self.run_ok(
            "eval fidelity --tokens 192 --later 32 --chunk 64 " + words,
            *ON_MODEL,
            *OF_TEXT,
            *more,
        )

    def test_one_reading_serves_policies_of_every_kind(self):
        table, _, result = self.fidelity(
            "--policy full,auto,qfilters,snapkv --budget 96,75%",
            *with_filters(),
        )
        self.assertEqual(result["task"], "fidelity")
        runs = result["runs"]
        self.assertEqual(
            [(run["policy"], run["budget"]) for run in runs],
            [("full", None)]
            + [
                (policy, budget)
                for policy in ("auto", "qfilters", "snapkv")
                for budget in (96, 144)
            ],
        )
        for run in runs:
            self.assertEqual(run["protocol"], "streaming")
            self.assertEqual((run["offset"], run["later"]), (192, 32))
            self.assertEqual(run["tokens"], 224)
            for key in ("error", "rank_correlation", "rows"):
                layers = run["fidelity"][key]
                self.assertEqual([len(heads) for heads in layers], [3] * 30)
        self.assertEqual(runs[0]["mean_error"], 0)
        self.assertIsNone(runs[0]["mean_rank_correlation"])
        for policy in (1, 3, 5):
            small, large = runs[policy : policy + 2]
            self.assertGreater(small["mean_error"], large["mean_error"])
            self.assertEqual(
                small["mean_rank_correlation"], large["mean_rank_correlation"]
            )
        self.assertIn("rank correlation", table)

    def test_once_keeps_the_very_budget(self):
        words = "--policy knorm,h2o,auto --budget 96 --protocol one-shot"
        _, _, result = self.fidelity(words, *with_filters())
        for run in result["runs"]:
            self.assertEqual(run["protocol"], "one-shot")
            self.assertEqual(run["interval"], 0)
            rows = [n for heads in run["fidelity"]["rows"] for n in heads]
            self.assertEqual(sum(rows), 96 * len(rows))
            if run["rule"] == "uniform":
                self.assertEqual(set(rows), {96})
            kv = run["kv_bytes"]
            self.assertLess(kv["compressed"], kv["full"])
            self.assertGreater(kv["peak"], kv["full"])


class OneShotTest(CliTest):
    def test_a_needle_is_asked_for_after_one_reading(self):
        words = (
            "eval needle --lengths 256 --depths 30 --keys 58291,40716"
            " --chunk 128 --protocol "
        )
        _, _, streaming = self.run_ok(
            words + "streaming --policy full", *ON_MODEL, *OF_TEXT
        )
        _, _, result = self.run_ok(
            words + "one-shot --policy full,streaming,auto,snapkv,llama"
            " --budget 64,500",
            *ON_MODEL,
            *OF_TEXT,
            *with_filters(),
        )
        runs = {
            (run["policy"], run["budget"]): run for run in result["runs"]
        }
        full = runs["full", None]
        self.assertEqual(full["cells"], streaming["runs"][0]["cells"])
        for run in runs.values():
            self.check_run(run)
            self.assertEqual(run["protocol"], "one-shot")
            self.assertEqual(run["query"], "agnostic")
        # A budget beyond the context changes nothing at all.
        for policy in ("streaming", "auto", "snapkv"):
            self.assertEqual(runs[policy, 500]["cells"], full["cells"])
            self.assertLess(
                runs[policy, 64]["kv_bytes"]["compressed"],
                full["kv_bytes"]["compressed"],
            )
        self.assertEqual(runs["streaming", 64]["accuracy"], 0)
        self.assertEqual(full["accuracy"], 1)
        self.assertEqual(runs["llama", None]["accuracy"], 1)
        self.assertNotIn("compressed", runs["llama", None]["kv_bytes"])

    def test_perplexity_counts_behind_what_was_compressed(self):
        words = (
            "eval perplexity --tokens 256 --from 128 --decode 4 --chunk 64"
            " --policy full,knorm --budget 32 --protocol "
        )
        _, _, once = self.run_ok(words + "one-shot", *ON_MODEL, *OF_TEXT)
        _, _, steps = self.run_ok(words + "streaming", *ON_MODEL, *OF_TEXT)
        full, knorm = once["runs"]
        # 127 predictions of 256 tokens: --from is at most half.
        self.assertEqual(full["predictions"], knorm["predictions"])
        self.assertEqual(
            full["predictions"], steps["runs"][0]["predictions"]
        )
        self.assertAlmostEqual(
            full["perplexity"], steps["runs"][0]["perplexity"], places=3
        )
        self.assertGreater(knorm["perplexity"], full["perplexity"])
        self.assertEqual(full["offset"], 260)
        # Nothing goes behind the context.
        self.assertEqual(knorm["rows_kept"], 32 + 260 - 127)

    def test_ruler_and_questions_take_it(self):
        _, _, ruler = self.run_ok(
            "eval ruler --tasks niah_single_2 --lengths 512"
            " --policy full,knorm --budget 64 --protocol one-shot",
            *ON_MODEL,
            *OF_TEXT,
        )
        full, knorm = ruler["runs"]
        self.assertGreater(
            knorm["cells"][0]["compression_ratio"],
            full["cells"][0]["compression_ratio"],
        )
        questions = self.folder / "q.jsonl"
        questions.write_text(
            '{"context": "Rex is a dog. Tom is a cat.", "question":'
            ' "What is Rex?", "answers": ["dog"]}\n'
        )
        _, _, asked = self.run_ok(
            "eval questions --generate 4 --policy full,streaming --budget 6"
            " --sink 1 --protocol one-shot --file",
            questions,
            *ON_MODEL,
        )
        self.assertEqual(
            [run["protocol"] for run in asked["runs"]], ["one-shot"] * 2
        )

    def test_a_benchmark_of_decoding_has_none(self):
        self.check_refusal(
            "bench decode --protocol one-shot --policy full",
            *ON_MODEL,
            *OF_TEXT,
            says=["decode: there is no protocol one-shot"],
        )


if __name__ == "__main__":
    sys.exit(cli_case.main())
