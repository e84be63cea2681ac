"""That a bounded cache really is smaller: resident memory, not a mask.

QFILTERS=build/release/bin/qfilters python3 cli_memory_test.py
"""

import sys

import cli_case
from cli_case import OF_TEXT, ON_MODEL, CliTest, with_filters

TOKENS = 2048
BUDGET = 256
ROW_BYTES = 30 * 3 * (64 + 64) * 2  # one row of every head, SmolLM2-135M


class MemoryTest(CliTest):
    def measure(self, policy, rule):
        """Each policy runs in a process of its own: its peak is its own."""
        _, _, result = self.run_ok(
            f"eval perplexity --tokens {TOKENS} --budget {BUDGET} "
            f"--policy {policy} --rule {rule}",
            *ON_MODEL,
            *OF_TEXT,
            *with_filters(),
        )
        return result["runs"]

    def check_saving(self, rule):
        full, ours = self.measure("full,auto", rule)
        kept = full["kv_bytes"]["peak"] - ours["kv_bytes"]["peak"]
        # What the stated bytes must come from: rows that are not there.
        rows = TOKENS - BUDGET - ours["interval"] - 63  # and ends of blocks
        self.assertGreater(kept, 0.95 * rows * ROW_BYTES)
        saved = full["peak_rss_bytes"] - ours["peak_rss_bytes"]
        self.assertGreater(saved, 0.9 * kept)

    def test_resident_memory_shrinks_as_stated_with_equal_rows(self):
        self.check_saving("uniform")

    def test_resident_memory_shrinks_as_stated_with_a_shared_budget(self):
        self.check_saving("shared")


if __name__ == "__main__":
    sys.exit(cli_case.main())
