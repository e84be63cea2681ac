"""Saved states: a run that is stopped and goes on is the run itself.

QFILTERS=build/release/bin/qfilters python3 cli_state_test.py
"""

import os
import pty
import signal
import subprocess
import sys

import cli_case
from cli_case import (
    ASSETS,
    ON_MODEL,
    PROMPT,
    TEXT,
    TIMEOUT,
    CliTest,
    catches,
    with_filters,
    run,
    wait_until,
)

# Small, so that both parts of a run evict.
RUN = "--budget 64 --recent 24 --interval 8 --ignore-eos --chunk 64 "
QUESTION = " In one sentence, the project is"


def read_terminal(screen, until=None):
    """What is written to a terminal, up to some bytes or its end."""
    shown = b""
    while until is None or until not in shown:
        try:
            shown += os.read(screen, 4096)
        except OSError:  # nobody has it open for writing any more
            break
    return shown


class StateTest(CliTest):
    def setUp(self):
        super().setUp()
        self.state = self.folder / "run.state"
        self.document = self.folder / "document.txt"
        with open(TEXT) as text:
            self.document.write_text(text.read(900))

    def bounded(self, words, *more, stdin=""):
        return self.generate(
            RUN + words, *with_filters(), *more, stdin=stdin
        )

    def save_document(self, words="-n 0"):
        return self.bounded(
            words,
            "--prompt-file",
            self.document,
            "--save-state",
            self.state,
        )

    def test_a_question_after_a_saved_prompt_is_answered_alike(self):
        straight, whole = self.bounded(
            "-n 30", "--prompt-file", self.document, "--prompt", QUESTION
        )
        self.save_document()
        before = self.state.read_bytes()
        text, result = self.bounded(
            "-n 30", "--load-state", self.state, "--prompt", QUESTION
        )
        self.assertEqual(text, straight)
        for key in ("offset", "rows_kept", "evictions"):
            self.assertEqual(result[key], whole[key], key)
        self.assertGreater(result["evictions"], 3)
        self.assertGreater(result["loaded_tokens"], 100)
        self.assertEqual(
            result["loaded_tokens"] + result["prompt_tokens"],
            whole["prompt_tokens"],
        )
        self.assertEqual(self.state.read_bytes(), before)

    def test_an_answer_goes_on_where_it_was_cut(self):
        straight, whole = self.bounded("-n 40", "--prompt", PROMPT)
        for cut in (1, 17):
            text, _ = self.bounded(
                f"-n {cut}", "--prompt", PROMPT, "--save-state", self.state
            )
            # The state may be replaced by what becomes of it.
            for rest in (3, 40 - 3 - cut):
                more, result = self.bounded(
                    f"-n {rest}",
                    "--load-state",
                    self.state,
                    "--save-state",
                    self.state,
                )
                text = text[:-1] + more
            self.assertEqual(text, straight)
            self.assertEqual(result["offset"], whole["offset"])

    def test_every_policy_goes_on_alike(self):
        for policy in ("full", "streaming", "knorm", "random"):
            words = f"--policy {policy} -n"
            straight, _ = self.bounded(words + " 20", "--prompt", PROMPT)
            text, _ = self.bounded(
                words + " 8", "--prompt", PROMPT, "--save-state", self.state
            )
            more, _ = self.bounded(words + " 12", "--load-state", self.state)
            self.assertEqual(text[:-1] + more, straight, policy)

    def test_the_random_policy_goes_on_with_its_seed(self):
        words = "--policy random --seed 9 -n"
        straight, _ = self.bounded(words + " 20", "--prompt", PROMPT)
        text, _ = self.bounded(
            words + " 8", "--prompt", PROMPT, "--save-state", self.state
        )
        more, _ = self.bounded(words + " 12", "--load-state", self.state)
        self.assertEqual(text[:-1] + more, straight)

    def test_a_character_that_was_cut_is_finished(self):
        words = "--policy full --temp 0 --ignore-eos"
        prompt = "🎉🎊🎁🎂🎃🎄🎅🎆🎇 日本語のテキスト: "
        straight, _ = self.generate(words + " -n 12", "--prompt", prompt)
        for cut in range(1, 6):
            text, _ = self.generate(
                f"{words} -n {cut}",
                "--prompt",
                prompt,
                "--save-state",
                self.state,
            )
            more, _ = self.generate(
                f"{words} -n {12 - cut}", "--load-state", self.state
            )
            joined = text[:-1] + more if text else more
            self.assertEqual(joined, straight, cut)

    def test_an_answer_that_ended_stays_ended(self):
        text, whole = self.generate(
            "--policy full --temp 0 -n 60 --chat",
            "--save-state",
            self.state,
            stdin="What is the capital of France?\n",
        )
        self.assertLess(whole["generated_tokens"], 60)
        more, result = self.generate(
            "--policy full --temp 0 -n 20", "--load-state", self.state
        )
        self.assertEqual(more, "")
        self.assertEqual(result["stop"], "end")
        more, result = self.generate(
            "--policy full --temp 0 -n 3 --ignore-eos",
            "--load-state",
            self.state,
        )
        self.assertEqual(result["generated_tokens"], 3)

    def test_a_given_seed_starts_the_sampler_anew(self):
        self.save_document()
        texts = [
            self.bounded(f"-n 20 {seed}", "--load-state", self.state)[0]
            for seed in ("", "--seed 0", "--seed 1", "--seed 1")
        ]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[2], texts[3])
        self.assertNotEqual(texts[0], texts[2])

    def test_a_chat_is_carried_on(self):
        words = "--chat -n 12"
        ask = "Hello there\n"
        straight, whole = self.bounded(words, stdin=ask + ask)
        one, _ = self.bounded(words, "--save-state", self.state, stdin=ask)
        two, result = self.bounded(words, "--load-state", self.state, stdin=ask)
        self.assertEqual(one + two, straight)
        self.assertEqual(result["offset"], whole["offset"])

    def test_a_chat_about_a_saved_document(self):
        self.save_document()
        text, result = self.bounded(
            "--chat -n 8", "--load-state", self.state, stdin="What is it?\n"
        )
        self.assertEqual(result["turns"], 1)
        self.assertGreater(result["loaded_tokens"], 100)
        self.assertGreater(len(text), 1)

    def refuse(self, words, *more, says):
        state = self.state.read_bytes()
        self.check_refusal(
            "generate -n 4 --load-state",
            self.state,
            *words.split(),
            *more,
            says=says,
        )
        self.assertEqual(self.state.read_bytes(), state)

    def test_a_state_of_another_run_is_refused(self):
        self.save_document()
        arguments = [*with_filters(), *ON_MODEL]
        budget = "--recent 24 --interval 8 --budget "
        for words, says in (
            (budget + "65", ["'budget 64'", "'budget 65'"]),
            ("--recent 23 --interval 8 --budget 64", ["'recent 24'"]),
            ("--recent 24 --interval 9 --budget 64", ["'interval 8'"]),
            (RUN + "--sink 3", ["'sinks 4'"]),
            (RUN + "--cache-type int8", ["'dtype float16'", "as int8'"]),
            (RUN + "--policy knorm", ["'policy auto'"]),
            (RUN + "--policy full", ["'policy auto'"]),
            (RUN + "--policy llama", ["llama.cpp's own cache"]),
            (budget + "50%", ["50%"]),
        ):
            self.refuse(words, *arguments, says=says)
        other = self.folder / "other.npz"
        done = run(
            "calibrate --skip 30000 --tokens 200 --context 128 --out",
            other,
            *ON_MODEL,
            "--text",
            TEXT,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.refuse(RUN, "--filters", other, *ON_MODEL, says=["'scorer "])

    def test_a_state_of_another_model_is_refused(self):
        gemma = ASSETS / "gemma-3-270m-q4_k_m.gguf"
        if not gemma.exists():
            self.skipTest(f"no {gemma}: run `make assets`")
        self.bounded(
            "--policy full -n 2", "--prompt", "A", "--save-state", self.state
        )
        self.refuse("--policy full --model", gemma, says=["another model file"])

    def test_a_damaged_state_is_refused(self):
        self.save_document()
        whole = self.state.read_bytes()
        middle = len(whole) // 2
        damaged = (
            b"",
            b"no state",
            whole[:middle],
            whole[:-1],
            whole + b"\0",
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            whole[:8] + b"\7" + whole[9:],
        )
        for content in damaged:
            self.state.write_bytes(content)
            self.refuse(
                RUN, *with_filters(), *ON_MODEL, says=[str(self.state)]
            )

    def test_states_are_refused_before_any_work(self):
        words = "generate --model m --policy full --prompt p"
        self.check_refusal(
            words + " --load-state gone.state", says=["gone.state"]
        )
        nowhere = self.folder / "no" / "folder"
        self.check_refusal(
            words + " --save-state", nowhere, says=[str(nowhere)]
        )
        self.check_refusal(
            words + " --save-state", self.folder, says=[str(self.folder)]
        )
        out = self.folder / "both"
        self.check_refusal(
            words, "--save-state", out, "--json", out, says=["would overwrite"]
        )
        out.write_bytes(b"")
        self.check_refusal(
            words, "--load-state", out, "--json", out, says=["would overwrite"]
        )
        self.check_refusal("generate --model m", says=["--load-state"])
        for option in ("--load-state", "--save-state"):
            self.check_refusal(words, option, "", says=[option, "no file"])
        huge = self.folder / "huge"
        huge.touch()
        os.truncate(huge, 1 << 40)
        self.check_refusal(
            words, "--load-state", huge, says=["no snapshot", str(huge)]
        )

    def test_a_chat_without_input_has_no_state(self):
        done = run(
            "generate --chat --policy full --save-state",
            self.state,
            *ON_MODEL,
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"there was no input", done.stderr)
        self.assertFalse(self.state.exists())

    def test_an_interrupted_answer_is_saved_where_it_stopped(self):
        process = self.start(
            "generate -n 100000 --ignore-eos --policy streaming --budget 64",
            *ON_MODEL,
            "--prompt",
            PROMPT,
            "--save-state",
            str(self.state),
        )
        process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 0)
        _, result = self.generate(
            "-n 4 --policy streaming --budget 64", "--load-state", self.state
        )
        self.assertGreater(result["loaded_tokens"], 12)

    def test_a_chat_keeps_the_turns_before_an_interrupt(self):
        ask = "Hello there\n"
        words = "--chat --policy streaming --budget 64 -n 8"
        self.generate(words, "--save-state", self.state, stdin=ask)
        after_one_turn = self.state.read_bytes()
        self.state.unlink()
        # Only a terminal is shown how far a long message has been read.
        screen, terminal = pty.openpty()
        self.addCleanup(os.close, screen)
        process = subprocess.Popen(
            [
                cli_case.PROGRAM,
                "generate",
                *words.split(),
                *ON_MODEL,
                "--save-state",
                self.state,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=terminal,
        )
        os.close(terminal)
        long_message = "What is a package? " * 2000 + "\n"
        process.stdin.write((ask + long_message).encode())
        process.stdin.flush()
        errors = read_terminal(screen, b"prefill [")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        errors += read_terminal(screen)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn(b"ends before the last message", errors)
        self.assertEqual(self.state.read_bytes(), after_one_turn)

    def test_an_interrupted_prefill_leaves_the_old_state(self):
        self.state.write_bytes(b"old")
        process = self.start(
            "generate --chunk 32 --policy streaming --budget 64",
            *ON_MODEL,
            "--prompt-file",
            TEXT,
            "--save-state",
            str(self.state),
        )
        wait_until(
            lambda: catches(process.pid, signal.SIGINT), "the prefill begins"
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn(b"no state saved", errors)
        self.assertEqual(self.state.read_bytes(), b"old")


if __name__ == "__main__":
    sys.exit(cli_case.main())
