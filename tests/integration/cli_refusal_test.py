"""What the command line refuses: exit code 2, one line, no file.

QFILTERS=build/release/bin/qfilters python3 cli_refusal_test.py
"""

import json
import math
import os
import pathlib
import struct
import sys

import cli_case
from cli_case import MODEL, OF_TEXT, ON_MODEL, TEXT, CliTest, filters, run


class UsageTest(CliTest):
    needs_model = False

    def test_help_lists_the_commands(self):
        done = run("--help")
        self.assertEqual(done.returncode, 0)
        for command in (
            "calibrate",
            "convert",
            "inspect",
            "generate",
            "eval",
        ):
            self.assertIn(command, done.stdout.decode())

    def test_each_command_has_help(self):
        for command in (
            "calibrate",
            "convert",
            "inspect",
            "generate",
            "eval perplexity",
            "eval needle",
            "eval ruler",
            "eval questions",
        ):
            done = run(command + " --help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("--threads", done.stdout.decode())
            self.assertEqual(done.stderr, b"")

    def test_version_is_one_line(self):
        done = run("--version")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout.decode(), r"\Aqfilters \d+\.\d+\.\d+\n\Z")

    def test_bad_usage_is_one_line(self):
        refuse = self.check_refusal
        refuse("", says=["subcommand"])
        refuse("bake", says=["unknown command or option 'bake'"])
        refuse("eval bake", says=["unknown command or option 'bake'"])
        refuse("generate", says=["--model is required"])
        refuse("generate --model m --bake", says=["--bake"])
        refuse("generate --model m -n x", says=["x"])
        refuse("generate --model m --prompt p --sink=-1", says=["--sink: '-1'"])
        refuse("eval needle --model m --text t --lengths 5,-6", says=["'-6'"])

    def test_an_impossible_isa_is_refused_with_the_possible_ones(self):
        env = {**os.environ, "QFILTERS_ISA": "nonsense"}
        self.check_refusal(
            "inspect gone.npz",
            says=["'nonsense' cannot run here", "scalar"],
            env=env,
        )
        self.assertEqual(run("--version", env=env).returncode, 0)

    def test_a_missing_model_is_named(self):
        gone = self.folder / "gone.gguf"
        for command in (
            "generate --prompt p --policy full",
            f"calibrate --text {__file__} --out {self.folder / 'f.npz'}",
            f"eval perplexity --text {__file__} --policy full,llama",
        ):
            self.check_refusal(command, "--model", gone, says=[str(gone)])

    def test_a_file_that_is_no_model_is_named(self):
        self.check_refusal(
            "generate --prompt p --policy full --model",
            __file__,
            says=["cli_refusal_test.py"],
        )

    def test_bad_values_are_refused_before_the_model_is_loaded(self):
        for words, says in (
            ("--policy best", "unknown name 'best'; known: llama, full, "),
            ("--budget 12apples", "'12apples' has an unknown unit"),
            ("--temp=-1", "temp"),
            ("--top-p 2", "top-p"),
            ("--threads 0", "threads"),
            ("--chunk 0", "chunk"),
            ("--cache-type q8_0", "'q8_0' is not one of f16, int8"),
            ("--llama-flash-attn maybe", "'maybe' is neither on nor off"),
            ("--llama-cache-type q8_0 --policy llama", "flash attention"),
            ("--chat", "--chat takes its messages from stdin"),
        ):
            command = "generate --model gone.gguf --prompt p " + words
            self.check_refusal(command, says=[says])
        self.check_refusal(
            "generate --model gone.gguf", says=["give --prompt"]
        )
        for words, says in (
            ("perplexity --protocol twice", "known: streaming, one-shot"),
            ("perplexity --protocol one-shot --from 0", "--from 0 leaves"),
            ("needle --protocol one-shot --interval 64", "evicts once"),
            ("fidelity --later 0", "later=0: each must be in 1.."),
            ("fidelity --policy full,llama", "policy llama keeps rows"),
            ("perplexity --tokens 1", "--tokens must be 2 or more"),
            ("needle --keys 12", "five digits"),
            ("needle --depths 120", "not in 0..100"),
            ("needle --phrasings 1,9", "phrasing 9 is not in 1..6"),
            ("needle --skips=-5", "'-5' is not a whole number"),
            ("needle --skips 4000000000", "a skip of more than"),
            ("ruler --tasks vt,qa_1", "unknown task 'qa_1'; known: niah_"),
            ("ruler --tasks vt,vt", "vt stands twice"),
            ("ruler --lengths 0", "length 0 is not in 1.."),
            ("ruler --lengths 4000000000", "is not in 1.."),
            ("ruler --samples 0", "samples: 0 is not in 1.."),
            ("ruler --policy best", "unknown name 'best'"),
            (f"ruler --kvpress {__file__}", "is not a directory"),
            (f"ruler --ruler-out {__file__}/x", "is not a directory"),
        ):
            self.check_refusal(
                f"eval {words} --model gone.gguf --text t", says=[says]
            )

    def test_bad_questions_are_refused_with_their_line(self):
        good = {"context": "c", "question": "q", "answers": ["a"]}
        file = self.folder / "q.jsonl"
        for line, says in (
            (b"{", "not JSON"),
            (b'{"question": "\xff"}', "not JSON"),
            (b"[" * (2 << 20), "not JSON"),
            (b" " * (17 << 20), "longer than 16 MiB"),
            (b"[]", "not a JSON object"),
            (b'{"context": "c", "answers": ["a"]}', 'no "question"'),
            (b'{"context": "c", "question": "q"}', 'no "answers"'),
            (
                b'{"context": "c", "question": "q", "answers": []}',
                "one or more",
            ),
            (
                b'{"context": "c", "question": "q", "answers": [""]}',
                "empty text",
            ),
            (b'{"question": "q", "answers": ["a"]}', "give one of"),
            (
                b'{"context_file": "gone.txt", "question": "q",'
                b' "answers": ["a"]}',
                "gone.txt: No such file",
            ),
        ):
            file.write_bytes(json.dumps(good).encode() + b"\n\n" + line)
            self.check_refusal(
                "eval questions --model gone.gguf --file",
                file,
                says=["q.jsonl line 3: ", says],
            )
        file.write_bytes(b"\n")
        for path, says in (
            (file, "holds no question"),
            (self.folder, "no regular file"),
            (self.folder / "gone", "No such file"),
        ):
            self.check_refusal(
                "eval questions --model gone.gguf --file", path, says=[says]
            )
        file.write_text(json.dumps(good))
        self.check_refusal(
            f"eval questions --model gone.gguf --file {file} --json {file}",
            says=["would overwrite"],
        )
        self.check_refusal(
            f"eval questions --model gone.gguf --file {file} --generate 0",
            says=["0 tokens to generate"],
        )

    def test_an_output_that_cannot_be_written_is_refused_first(self):
        nowhere = self.folder / "no" / "where.npz"
        model = "--model gone.gguf"
        for command, out in (
            (f"generate {model} --prompt p --json", nowhere),
            (f"eval perplexity {model} --text t --json", self.folder),
            (f"calibrate {model} --text t --out", nowhere),
        ):
            self.check_refusal(command, out, says=[str(out)])
        self.check_refusal(
            f"calibrate {model} --text t --out",
            self.folder / "f.bin",
            says=["f.bin", ".npz, .safetensors, .gguf"],
        )

    def test_an_output_never_replaces_another_file_of_the_run(self):
        model = self.folder / "model.gguf"
        model.write_bytes(b"a model")
        text = self.folder / "text.npz"
        text.write_text("a text")
        link = self.folder / "link.gguf"
        link.symlink_to(model)
        out = self.folder / "out.npz"
        for command in (
            f"generate --model {model} --prompt p --json {model}",
            f"generate --model {model} --prompt p --json {link}",
            f"generate --model {model} --prompt-file {text} --json {text}",
            f"eval needle --model {model} --text {text} --json {text}",
            f"calibrate --model {model} --text {text} --out {text}",
            f"calibrate --model {model} --text t --out {out} --json {out}",
            f"calibrate --model {model} --text t --out {out} --out {out}",
            f"inspect {text} --json {text}",
        ):
            self.check_refusal(command, says=["would overwrite"])
        self.assertEqual(model.read_bytes(), b"a model")
        self.assertEqual(text.read_text(), "a text")

    def test_numbers_that_are_too_large_are_refused(self):
        for option in ("-n", "--seed", "--top-k", "--chunk", "--interval"):
            self.check_refusal(
                "generate --model m --prompt p",
                option,
                "99999999999999999999",
                says=["too large"],
            )
        self.check_refusal(
            "generate --model m --prompt p -n 18446744073709551615",
            says=["-n must be at most"],
        )

    def test_odd_paths_are_refused_before_any_work(self):
        self.check_refusal(
            "calibrate --model m --text t --out",
            self.folder / ("a" * 300 + ".npz"),
            says=["File name too long"],
        )
        loop = self.folder / "loop.npz"
        loop.symlink_to(loop)
        self.check_refusal(
            "calibrate --model m --text t --out", loop, says=["loop.npz"]
        )
        self.assertTrue(loop.is_symlink())

    def test_what_cannot_be_printed_is_a_failed_run(self):
        with open("/dev/full", "wb") as full:
            done = run("--version", stdout=full)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count(b"\n"), 1)
        self.assertIn(b"standard output", done.stderr)

    def test_inspect_names_a_file_that_holds_no_filters(self):
        self.check_refusal("inspect", __file__, says=["cli_refusal_test.py"])
        self.check_refusal("inspect gone.npz", says=["gone.npz"])


class RefusalTest(CliTest):
    def refuse_run(self, words, *more, says):
        self.check_refusal(
            "eval perplexity " + words, *more, *ON_MODEL, *OF_TEXT, says=says
        )

    def refuse_prompt(self, words, *more, says):
        self.check_refusal("generate " + words, *more, *ON_MODEL, says=says)

    def test_a_truncated_model_is_refused(self):
        short = self.folder / "short.gguf"
        with open(MODEL, "rb") as whole:
            short.write_bytes(whole.read(4 << 20))
        self.check_refusal(
            "generate --prompt p --policy full --model",
            short,
            says=["short.gguf"],
        )

    def test_a_model_that_llama_cpp_gives_up_on_is_refused(self):
        # The second token named as the first: llama.cpp asserts on that.
        damaged = bytearray(pathlib.Path(MODEL).read_bytes())
        at = damaged.index(b"tokenizer.ggml.tokens") + 21 + 4 + 4 + 8
        size = struct.unpack_from("<Q", damaged, at)[0]
        first = bytes(damaged[at : at + 8 + size])
        second = at + 8 + size
        while struct.unpack_from("<Q", damaged, second)[0] != size:
            second += 8 + struct.unpack_from("<Q", damaged, second)[0]
        damaged[second : second + len(first)] = first
        path = self.folder / "twins.gguf"
        path.write_bytes(damaged)
        self.check_refusal(
            "generate --prompt p --policy full --model", path, says=["model"]
        )

    def test_a_prompt_file_that_is_a_folder_is_refused(self):
        self.refuse_prompt(
            "--policy full --prompt-file", self.folder, says=["a directory"]
        )

    def test_a_text_that_is_too_short_is_refused(self):
        text = self.folder / "short.txt"
        text.write_text("Only a few words.")
        for command, needed in (
            (f"calibrate --out {self.folder / 'f.npz'}", 16384),
            ("eval perplexity --policy full", 4096 + 64),
            ("eval needle --policy full", 2048),
            ("eval needle --policy full --skips 0,500", 2548),
            ("eval ruler --policy full", 2048),
        ):
            self.check_refusal(
                command,
                *ON_MODEL,
                "--text",
                text,
                says=["short.txt is too short", f"{needed} are needed"],
            )

    def test_a_task_without_room_is_refused_before_any_run(self):
        out = self.folder / "out"
        for words, says in (
            ("--lengths 256,2048", "length 256 has no room for task"),
            ("--lengths 300 --tasks cwe", "no room for task cwe"),
            (
                f"--budget 512,513 --policy knorm --kvpress {out}",
                "two runs would write the folder ruler__2048__",
            ),
        ):
            self.check_refusal(
                "eval ruler --policy full " + words,
                *ON_MODEL,
                *OF_TEXT,
                says=[says],
            )

    def safetensors(self, shape, fingerprint):
        path = self.folder / "other.safetensors"
        size = 4 * math.prod(shape)
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
        metadata = {"model_id": "m", "model_fingerprint": fingerprint}
        header = json.dumps({"q_filters": tensor, "__metadata__": metadata})
        length = struct.pack("<Q", len(header))
        path.write_bytes(length + header.encode() + bytes(size))
        return path

    def test_filters_of_another_model_of_the_same_shapes_are_refused(self):
        other = self.safetensors([30, 3, 64], "another")
        self.refuse_run(
            "--policy qfilters --filters",
            other,
            says=["'m' (another)", "expected"],
        )

    def test_filters_of_another_model_are_refused(self):
        other = self.safetensors([2, 1, 4], "")
        says = ["have 2 layers", "has 30"]
        self.refuse_run("--policy qfilters --filters", other, says=says)
        self.refuse_run("--policy full,qfilters --filters", other, says=says)

    def test_missing_filters_name_the_way_to_make_them(self):
        self.refuse_run("", says=["--filters", "qfilters calibrate"])
        for policy in ("auto", "qfilters", "expected", "squeeze"):
            other = "qfilters" if policy == "auto" else "auto"
            self.refuse_run(
                f"--policy {policy} --filters",
                filters(other),
                says=["none of these", f"calibrate --policy {policy}"],
            )
        gone = self.folder / "gone.npz"
        self.refuse_run(
            "--filters", gone, says=[str(gone), "qfilters calibrate"]
        )

    def test_damaged_filters_are_refused(self):
        damaged = self.folder / "damaged.npz"
        damaged.write_bytes(pathlib.Path(filters()).read_bytes()[:5000])
        self.refuse_run("--filters", damaged, says=["damaged.npz"])

    def test_rules_floors_blocks_and_mergers_are_checked(self):
        for words, says in (
            ("--rule best", "uniform, per-layer, shared"),
            ("--floor 1.5", "floor"),
            ("--floor -1", "floor"),
            ("--block 0", "block"),
            ("--merge glue", "none, cam"),
        ):
            self.refuse_run("--policy random " + words, says=[says])

    def test_a_budget_of_protected_rows_only_is_refused(self):
        for words in (
            "--budget 100 --recent 96",
            "--budget 4",
            "--budget 1% --recent 60",
            "--budget 1024,100 --recent 96",
        ):
            self.refuse_run(
                "--policy full,streaming " + words,
                says=["must be more than sink (4) + recent"],
            )

    def test_memory_without_a_row_is_refused(self):
        self.refuse_run(
            "--policy knorm --budget 1MiB", says=["1MiB leaves no row"]
        )

    def test_a_model_on_a_gpu_is_refused(self):
        self.refuse_prompt(
            "--prompt p --policy full --gpu-layers 1", says=["GPU"]
        )

    def test_an_empty_prompt_is_refused(self):
        self.refuse_prompt(
            "--policy full --prompt", "", says=["the prompt is empty"]
        )

    def test_a_prompt_beyond_the_trained_length_is_refused_when_asked(self):
        self.refuse_prompt(
            "--policy streaming --stop-at-trained-length --prompt-file",
            TEXT,
            says=["trained length of 8192"],
        )

    def test_a_failed_run_leaves_older_files_alone(self):
        out = self.folder / "f.npz"
        out.write_text("older")
        self.json.write_text("older")
        self.check_refusal(
            f"calibrate --skip 999999 --out {out} --json {self.json}",
            *ON_MODEL,
            "--text",
            __file__,
            says=["too short"],
        )
        self.assertEqual(out.read_text(), "older")
        self.assertEqual(self.json.read_text(), "older")


if __name__ == "__main__":
    sys.exit(cli_case.main())
