"""The C API from outside: what the library shows, the C example, and Python.

QFILTERS_C_LIBRARY=build/release/src/libqfilters_c.so \
QFILTERS_C_EXAMPLE=build/release/bin/c_api_example python3 c_api_test.py
"""

import ctypes
import os
import pathlib
import re
import subprocess
import unittest
from ctypes import POINTER, byref, sizeof

HEADER = pathlib.Path(__file__).parents[2] / "include/qfilters/c_api.h"
LIBRARY = os.environ["QFILTERS_C_LIBRARY"]
EXAMPLE = os.environ["QFILTERS_C_EXAMPLE"]
OK, INVALID_ARGUMENT, FLOAT32 = 0, 1, 0

EXAMPLE_OUTPUT = """\
tokens  0 to 24 see up to 25 rows, value 3 is 3.0
tokens 25 to 49 see up to 37 rows, value 3 is 3.0
tokens 50 to 74 see up to 37 rows, value 3 is 3.0
tokens 75 to 99 see up to 37 rows, value 3 is 3.0
kept: 0 1 10 20 30 40 50 60 70 80 90 99
restored: 0 1 10 20 30 40 50 60 70 80 90 99
error: qf_cache_restore: snapshot: the checksum is wrong; \
it is cut short or damaged
"""


class Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in ("batch", "heads", "tokens", "dim")
    ] + [(name, ctypes.c_ssize_t) for name in ("of_batch", "of_head", "of_token")]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("shape", Shape),
    ]


class Output(ctypes.Structure):
    _fields_ = [("data", POINTER(ctypes.c_float)), ("shape", Shape)]


class Config(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [
            (name, ctypes.c_int64)
            for name in (
                "budget",
                "n_sink",
                "recent",
                "interval",
                "calib_tokens",
                "sign",
            )
        ]
        + [
            ("min_retention", ctypes.c_double),
            ("on_low_retention", ctypes.c_int32),
        ]
    )


WarningHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class LibraryTest(unittest.TestCase):
    def test_shows_what_the_header_declares_and_nothing_else(self):
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", LIBRARY],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        shown = {line.split()[-1] for line in listed.splitlines()}
        declared = re.findall(
            r"QF_API\s[^;]*?\b(qf_\w+)\s*\(", HEADER.read_text()
        )
        self.assertEqual(shown, set(declared))
        self.assertEqual(len(declared), len(set(declared)))

    def test_the_example_prints_what_it_keeps(self):
        done = subprocess.run([EXAMPLE], capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        self.assertEqual(done.stdout, EXAMPLE_OUTPUT)
        self.assertEqual(done.returncode, 0)


class BindingTest(unittest.TestCase):
    """Plain ctypes: one head, one dimension, so that a key is its score."""

    KEYS = [0.0, 5.0, 1.0, 4.0, 2.0, 3.0, -1.0, 2.5]

    @classmethod
    def setUpClass(cls):
        cls.library = ctypes.CDLL(LIBRARY)
        for name in ("qf_last_error", "qf_version"):
            getattr(cls.library, name).restype = ctypes.c_char_p
        cls.library.qf_tensor_dense.restype = Tensor
        cls.library.qf_output_dense.restype = Output

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        self.assertEqual(status, OK, self.library.qf_last_error())

    def read(self, name, element, *arguments):
        size = ctypes.c_size_t()
        zero = ctypes.c_size_t(0)
        self.call(name, *arguments, None, zero, byref(size))
        out = (element * size.value)()
        self.call(name, *arguments, out, size, byref(size))
        return out

    def tensor(self, values):
        data = (ctypes.c_float * len(values))(*values)
        one = ctypes.c_size_t(1)
        count = ctypes.c_size_t(len(values))
        view = self.library.qf_tensor_dense(
            data, FLOAT32, one, one, count, one
        )
        return view, data

    def make_cache(self):
        filters = ctypes.c_void_p()
        one = ctypes.c_size_t(1)
        self.call(
            "qf_filters_create",
            (ctypes.c_float * 1)(1.0),
            one,
            one,
            one,
            b"toy",
            None,
            byref(filters),
        )
        self.addCleanup(self.library.qf_filters_free, filters)
        config = Config()
        size = ctypes.c_size_t(sizeof(config))
        self.call("qf_config_init", byref(config), size)
        self.assertEqual(config.budget, 512)
        self.assertEqual(config.min_retention, 0.9)
        config.budget = 4
        config.n_sink = 1
        cache = ctypes.c_void_p()
        self.call(
            "qf_cache_create",
            byref(config),
            filters,
            ctypes.c_size_t(0),
            byref(cache),
        )
        self.addCleanup(self.library.qf_cache_free, cache)
        return cache

    def update(self, cache, values):
        keys, keep_alive = self.tensor(values)
        self.call("qf_cache_update", cache, byref(keys), byref(keys))
        del keep_alive  # the rows are copied

    def positions(self, cache):
        group = ctypes.c_size_t(0)
        return list(self.read("qf_cache_positions", ctypes.c_int32, cache, group))

    def test_keeps_the_rows_that_score_best(self):
        cache = self.make_cache()
        self.update(cache, self.KEYS)
        self.assertEqual(self.positions(cache), [0, 1, 3, 5])

    def test_attends_over_all_rows_of_an_update(self):
        cache = self.make_cache()
        self.update(cache, self.KEYS)
        queries, keep_alive = self.tensor([0.0] * len(self.KEYS))
        out = (ctypes.c_float * len(self.KEYS))()
        one = ctypes.c_size_t(1)
        view = self.library.qf_output_dense(
            out, one, one, ctypes.c_size_t(len(out)), one
        )
        self.call(
            "qf_cache_attend", cache, byref(queries), None, byref(view)
        )
        for i, value in enumerate(out):  # equal weights: the mean so far
            mean = sum(self.KEYS[: i + 1]) / (i + 1)
            self.assertAlmostEqual(value, mean, places=5)
        del keep_alive

    def test_saves_and_restores(self):
        cache = self.make_cache()
        self.update(cache, self.KEYS)
        saved = self.read("qf_cache_save", ctypes.c_char, cache)
        other = self.make_cache()
        self.call("qf_cache_restore", other, saved, ctypes.c_size_t(len(saved)))
        self.update(other, [9.0])
        self.assertEqual(self.positions(other), [0, 1, 3, 8])

    def test_warns_through_a_callback(self):
        cache = self.make_cache()
        heard = []
        handler = WarningHandler(lambda _, message: heard.append(message))
        self.call("qf_cache_on_warning", cache, handler, None)
        self.update(cache, self.KEYS)
        self.assertEqual(len(heard), 1)
        self.assertIn(b"4 of 8 tokens retained", heard[0])

    def test_says_what_is_wrong(self):
        self.assertEqual(
            self.library.qf_cache_settle(None), INVALID_ARGUMENT
        )
        self.assertEqual(
            self.library.qf_last_error(), b"qf_cache_settle: cache is NULL"
        )
        self.assertRegex(self.library.qf_version(), rb"\A\d+\.\d+\.\d+\Z")


if __name__ == "__main__":
    unittest.main()
