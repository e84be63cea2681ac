"""Filter files from one format into another.

QFILTERS=build/release/bin/qfilters python3 cli_convert_test.py
"""

import itertools
import json
import struct
import subprocess
import sys

import cli_case
from cli_case import ROOT, CliTest, run

PYTHON = ROOT / ".venv/bin/python"
VALUES = [1.5, -0.25, 3.0, 4.0, -5.0, 0.0]  # [1, 2, 3], negated in a file

# What the gguf package sees in a file.
READ_GGUF = """
import json, sys
from gguf import GGUFReader
reader = GGUFReader(sys.argv[1])
fields = {
    key: field.contents()
    for key, field in reader.fields.items()
    if not key.startswith("GGUF.")
}
tensors = [
    [t.name, t.tensor_type.name, t.shape.tolist(), t.data.tolist()]
    for t in reader.tensors
]
print(json.dumps([fields, tensors]))
"""

# A filter file as the gguf package writes it.
WRITE_GGUF = """
import sys
import numpy
from gguf import GGUFWriter
writer = GGUFWriter(sys.argv[1], "qfilters")
writer.add_name("a file of the gguf package")
writer.add_array("some.sizes", [1, 2, 3])
writer.add_array("some.words", ["a", "bc"])
writer.add_uint32("qfilters.version", 1)
writer.add_string("qfilters.sign", "negated")
writer.add_string("qfilters.model_id", "m")
for layer, shape in enumerate(((2, 3), (1, 5))):
    values = numpy.full(shape, -1.0 - layer, numpy.float32)
    values[0, 0] = 7
    writer.add_tensor(f"blk.{layer}.q_filter", values)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def published(path, values=VALUES):
    """A file as published ones are, without our metadata."""
    tensor = {"dtype": "F32", "shape": [1, 2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"q_filters": tensor}).encode()
    path.write_bytes(
        struct.pack("<Q", len(header))
        + header
        + struct.pack("<6f", *(-value for value in values))
    )
    return path


class ConvertTest(CliTest):
    needs_model = False

    def python(self, program, *words):
        if subprocess.run([PYTHON, "-c", "import gguf"]).returncode != 0:
            self.skipTest(f"{PYTHON} has no gguf package")
        done = subprocess.run(
            [PYTHON, "-c", program, *words], capture_output=True, check=True
        )
        return done.stdout

    def inspect(self, path):
        return self.run_ok("inspect", path)[2]

    def test_writes_every_format_from_every_format(self):
        first = published(self.folder / "f0.safetensors")
        before = self.inspect(first)
        kinds = ("npz", "safetensors", "gguf")
        for number, (one, two) in enumerate(itertools.product(kinds, kinds)):
            middle = self.folder / f"{number}a.{one}"
            last = self.folder / f"{number}b.{two}"
            out, err, result = self.run_ok("convert", first, middle)
            self.assertEqual(err, "")
            self.assertEqual(out.count("\n"), 1)
            for part in (str(middle), before["fingerprint"], "1 layers"):
                self.assertIn(part, out)
            self.assertEqual(result["command"], "convert")
            self.assertEqual(result["output"], str(middle))
            self.assertEqual(result["fingerprint"], before["fingerprint"])
            self.run_ok("convert", middle, last)
            after = self.inspect(last)
            for key in ("fingerprint", "metadata", "layers", "warnings"):
                self.assertEqual(after[key], before[key])

    def test_writes_the_sign_that_is_asked_for(self):
        first = published(self.folder / "f.safetensors")
        fingerprint = self.inspect(first)["fingerprint"]
        positive = struct.pack("<6f", *VALUES)
        negated = struct.pack("<6f", *(-value for value in VALUES))
        for kind, sign, stored in (
            ("safetensors", "", negated),
            ("safetensors", "--sign negated", negated),
            ("safetensors", "--sign positive", positive),
            ("gguf", "", positive),
            ("gguf", "--sign positive", positive),
            ("gguf", "--sign negated", negated),
            ("npz", "", positive),
            ("npz", "--sign positive", positive),
        ):
            path = self.folder / f"out.{kind}"
            self.run_ok("convert " + sign, first, path)
            self.assertIn(stored, path.read_bytes())
            self.assertEqual(self.inspect(path)["fingerprint"], fingerprint)

    def test_names_the_model_of_a_file_of_another_tool(self):
        first = published(self.folder / "f.safetensors")
        out = self.folder / "f.gguf"
        _, _, result = self.run_ok("convert", first, out, "--model-id", "a/b c")
        self.assertEqual(result["model_id"], "a/b c")
        self.assertEqual(self.inspect(out)["metadata"]["model_id"], "a/b c")

    def test_inspect_shows_a_gguf_file(self):
        out = self.folder / "f.gguf"
        self.run_ok("convert", published(self.folder / "f.safetensors"), out)
        text, _, result = self.run_ok("inspect", out)
        self.assertIn("layers       1", text)
        self.assertEqual((result["layers"][0]["heads"]), 2)
        self.assertEqual((result["layers"][0]["dim"]), 3)

    def test_the_gguf_package_reads_what_it_wrote(self):
        out = self.folder / "f.gguf"
        self.run_ok(
            "convert --model-id m",
            published(self.folder / "f.safetensors"),
            out,
        )
        fields, tensors = json.loads(self.python(READ_GGUF, out))
        self.assertEqual(fields["general.architecture"], "qfilters")
        self.assertEqual(fields["qfilters.version"], 1)
        self.assertEqual(fields["qfilters.sign"], "positive")
        self.assertEqual(fields["qfilters.model_id"], "m")
        self.assertEqual(fields["qfilters.n_samples"], 0)
        rows = [VALUES[:3], VALUES[3:]]
        self.assertEqual(tensors, [["blk.0.q_filter", "F32", [3, 2], rows]])

    def test_reads_what_the_gguf_package_wrote(self):
        path = self.folder / "f.gguf"
        self.python(WRITE_GGUF, path)
        seen = self.inspect(path)
        self.assertEqual(seen["metadata"]["model_id"], "m")
        shapes = [(each["heads"], each["dim"]) for each in seen["layers"]]
        self.assertEqual(shapes, [(2, 3), (1, 5)])
        out = self.folder / "f.npz"
        self.run_ok("convert", path, out)
        self.assertIn(
            struct.pack("<6f", -7, 1, 1, 1, 1, 1), out.read_bytes()
        )

    def test_refuses_an_output_that_is_the_input(self):
        first = published(self.folder / "f.safetensors")
        content = first.read_bytes()
        link = self.folder / "link.safetensors"
        link.symlink_to(first)
        for out in (first, link, self.folder / "." / "f.safetensors"):
            self.check_refusal("convert", first, out, says=["would overwrite"])
        self.check_refusal(
            "convert",
            first,
            self.folder / "g.npz",
            "--json",
            self.folder / "g.npz",
            says=["would overwrite"],
        )
        self.assertEqual(first.read_bytes(), content)

    def test_refuses_what_it_cannot_read_or_write(self):
        first = published(self.folder / "f.safetensors")
        out = self.folder / "g.npz"
        damaged = self.folder / "damaged.safetensors"
        damaged.write_bytes(first.read_bytes()[:-1])
        other = self.folder / "f.bin"
        other.write_bytes(first.read_bytes())
        gone = self.folder / "gone.npz"
        nowhere = self.folder / "no" / "where.npz"
        for words, says in (
            ((first, self.folder / "g.bin"), ["g.bin", ".gguf"]),
            ((first, self.folder / "g"), ["extension ''"]),
            ((other, out), ["f.bin", ".safetensors"]),
            ((gone, out), ["gone.npz", "does not exist"]),
            ((damaged, out), ["damaged.safetensors"]),
            ((first, nowhere), ["where.npz"]),
            ((first, out, "--sign", "negated"), ["g.npz", "always positive"]),
            ((first, out, "--sign", "other"), ["--sign"]),
            ((first,), ["out is required"]),
        ):
            self.check_refusal("convert", *words, says=says)

    def test_a_failed_conversion_leaves_older_files_alone(self):
        out = self.folder / "out.npz"
        out.write_text("older")
        damaged = self.folder / "damaged.npz"
        damaged.write_text("no filters")
        done = run("convert", damaged, out, "--json", self.json)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(out.read_text(), "older")
        self.assertFalse(self.json.exists())

    def test_layers_of_different_shapes_fit_all_but_safetensors(self):
        path = self.folder / "f.gguf"
        self.python(WRITE_GGUF, path)
        self.run_ok("convert", path, self.folder / "f.npz")
        self.check_refusal(
            "convert",
            path,
            self.folder / "f.safetensors",
            says=["[2, 3]", "[1, 5]"],
        )


if __name__ == "__main__":
    sys.exit(cli_case.main())
