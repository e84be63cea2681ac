#!/usr/bin/env python3
"""Cuts a small set out of a folder of golden vectors.

    make_small_golden.py FROM TO

TO gets a few streams of the groups selection and fallback, the pools that
they need, and all of the small groups: enough for a machine that has only this
project. Needs numpy (.venv has it). The same input gives the same bytes.
"""

import io
import json
import pathlib
import shutil
import sys
import zipfile

import numpy as np

DIM = 64  # the small groups use this key dimension, so streams do too
WHOLE = ["dtype", "edge", "retention", "mask", "artifacts", "construct"]
# Flat arrays of a stream group, and the field that says which part of each
# belongs to a case.
PARTS = {"scores_f32": "scores", "filters_f32": "filters"}


def write_npz(path, arrays):
    """np.savez_compressed, with a fixed date."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, np.ascontiguousarray(array))
            info = zipfile.ZipInfo(name + ".npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())


def pick(cases):
    """The shortest case of each (kind, stream) with the small dimension, and
    of each storage type."""
    best = {}
    for case in cases:
        if case["D"] != DIM:
            continue
        size = case["B"] * case["H"] * case["T"]
        for key in [
            (case["kind"], case["stream"]),
            (case["kind"], case["storage_dtype"], case["in_dtype"]),
            ("scores", "scores" in case),
        ]:
            if key not in best or size < best[key][0]:
                best[key] = (size, case["id"])
    ids = {case_id for _, case_id in best.values()}
    return [case for case in cases if case["id"] in ids]


def cut_streams(group, arrays):
    """The picked cases with their parts of the arrays moved together."""
    table = {case["id"]: i for i, case in enumerate(group["cases"])}
    group["cases"] = pick(group["cases"])
    out = {"cases_i32": [], "upd_u32": [], "upd_ratio_f64": [], "kept_i16": []}
    out.update({name: [] for name in PARTS if name in arrays})
    length = dict.fromkeys(out, 0)

    def move(name, begin, count):
        out[name].append(arrays[name][begin : begin + count])
        length[name] += count
        return length[name] - count

    columns = group["cases_i32_columns"]
    for case in group["cases"]:
        begin, end = case["upd"]
        move("upd_ratio_f64", begin, end - begin)
        start = move("upd_u32", begin, end - begin)
        case["upd"] = [start, start + end - begin]
        row = arrays["cases_i32"][table[case["id"]]].copy()
        row[columns.index("upd_begin")] = case["upd"][0]
        row[columns.index("upd_end")] = case["upd"][1]
        out["cases_i32"].append(row[None])
        for kept in case["kept"]:
            count = int(np.prod(kept["shape"]))
            kept["begin"] = move("kept_i16", kept["begin"], count)
        for name, field in PARTS.items():
            if name in out and field in case:
                part = case[field]
                count = int(np.prod(part["shape"]))
                part["begin"] = move(name, part["begin"], count)
    out = {name: np.concatenate(parts) for name, parts in out.items()}
    group["shapes"] = {name: list(a.shape) for name, a in out.items()}
    return out


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(pathlib.Path, sys.argv[1:])
    manifest = json.loads((source / "manifest.json").read_text("utf-8"))
    groups = manifest["groups"]
    manifest["groups"] = {}
    target.mkdir(parents=True, exist_ok=True)
    for name in ["selection", "fallback"]:
        group = groups[name]
        with np.load(source / group["file"]) as arrays:
            write_npz(target / group["file"], cut_streams(group, arrays))
        manifest["groups"][name] = group
    for name in WHOLE:
        group = groups[name]
        manifest["groups"][name] = group
        if group["file"] and group["file"].endswith(".npz"):
            with np.load(source / group["file"]) as arrays:
                write_npz(target / group["file"], dict(arrays))
    (target / "artifacts").mkdir(exist_ok=True)
    for file in sorted((source / "artifacts").iterdir()):
        shutil.copyfile(file, target / "artifacts" / file.name)
    with np.load(source / "pools.npz") as arrays:
        pools = {k: a for k, a in arrays.items() if k.endswith(f"_D{DIM}")}
    write_npz(target / "pools.npz", pools)
    lines = json.dumps(manifest, separators=(",", ":"))
    lines = lines.replace('{"id":', '\n{"id":') + "\n"
    (target / "manifest.json").write_text(lines, "utf-8")


if __name__ == "__main__":
    main()
