"""The work of tools/peer_kvpress; see there."""

import argparse
import copy
import json
import pathlib
import subprocess
import sys

import numpy as np
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.utils import compute_n_kept, get_prerope_query_states
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# Ours, with theirs: sinks and recent rows as their press has them.
CANDIDATES = [
    ("knorm", 0, 0, KnormPress),
    ("keydiff", 0, 0, KeyDiffPress),
    ("snapkv-mean", 0, 64, SnapKVPress),
    ("tova", 0, 1, TOVAPress),
    ("expected", 4, 0, ExpectedAttentionPress),
    ("streaming", 4, 0, StreamingLLMPress),
]


class Layer:
    """What one attention layer saw: rows as the cache has them, in float16."""

    def __init__(self, module, kwargs, rows):
        self.module = module
        self.hidden = kwargs["hidden_states"]
        self.embeddings = kwargs["position_embeddings"]
        self.keys = rows.keys.half().float()
        self.values = rows.values.half().float()
        query = get_prerope_query_states(module, self.hidden)
        self.queries, _ = apply_rotary_pos_emb(query, query, *self.embeddings)

    def scores(self, press, dtype):
        """Those of kvpress, [kv_heads, tokens]."""
        module = copy.deepcopy(self.module).to(dtype)
        module.rotary_emb = copy.deepcopy(self.module.rotary_emb)
        cos, sin = self.embeddings
        return press.score(
            module,
            self.hidden.to(dtype),
            self.keys.to(dtype),
            self.values.to(dtype),
            None,
            {"position_embeddings": (cos.to(dtype), sin.to(dtype))},
        )[0]

    def statistics(self, press):
        """Our filters of what they find out about queries: [kv_heads, size]."""
        query = get_prerope_query_states(
            self.module, self.hidden[:, press.n_sink :]
        )[0].double()
        heads, tokens, dim = query.shape
        mean = query.mean(dim=1)
        off = query - mean[:, None]
        covariance = off.transpose(1, 2) @ off / tokens
        rows, columns = np.tril_indices(dim)
        angles = self.module.rotary_emb.inv_freq.double().numpy()
        half = np.arange(dim // 2)
        head = [-angles, angles, half + dim // 2, half]
        kv_heads = self.keys.shape[1]
        out = []
        for h in range(heads):
            if h % (heads // kv_heads) == 0:
                out.append(list(head))
            out[-1].append(mean[h].numpy() / np.sqrt(dim))
            out[-1].append(covariance[h].numpy()[rows, columns] / dim)
        return np.stack([np.concatenate(parts) for parts in out])


def read_layers(gguf, text, tokens):
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    ids = tokenizer(
        text.read_text()[: 8 * tokens], return_tensors="pt"
    ).input_ids[:, :tokens]
    assert ids.shape[1] == tokens
    seen = []
    for block in model.model.layers:
        block.self_attn.rotary_emb = model.model.rotary_emb
        block.self_attn.register_forward_hook(
            lambda module, _, kwargs, out: seen.append((module, kwargs)),
            with_kwargs=True,
        )
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        return [
            Layer(module, kwargs, rows)
            for (module, kwargs), rows in zip(seen, cache.layers)
        ]


def write_filters(path, layers, press):
    meta = {
        "version": 1,
        "n_layers": len(layers),
        "model_id": "",
        "query_site": "statistics",
    }
    members = {"__meta__": np.array(json.dumps(meta))}
    for i, layer in enumerate(layers):
        members[f"layer_{i}"] = layer.statistics(press).astype("<f4")
    np.savez(path, **members)


def ours(replay, policy, kept, sinks, recent, layers, work, filters):
    first = layers[0]
    shape = (
        len(layers),
        first.queries.shape[1],
        first.keys.shape[1],
        *first.keys.shape[2:],
    )
    words = [policy, kept, sinks, recent, *shape, work]
    words += [filters] if policy == "expected" else []
    done = subprocess.run(
        [replay, *map(str, words)], check=True, capture_output=True, text=True
    )
    return [set(map(int, line.split())) for line in done.stdout.splitlines()]


def compare_head(theirs, exact, kept, mine):
    """Rows that differ, and those of them that are no ties: further from the
    score where the choice is cut than rounding moves their own scores."""
    chosen = set(theirs.topk(kept).indices.tolist())
    different = sorted(chosen ^ mine)
    if not different:
        return 0, 0
    cut = exact.sort(descending=True).values
    noise = 4 * float((theirs.double() - exact).abs().max())
    noise += 1e-5 * float(cut[kept - 1].abs())
    far = [
        row
        for row in different
        if exact[row] < cut[kept - 1] - noise or exact[row] > cut[kept] + noise
    ]
    return len(different), len(far)


def compare(layers, candidate, kept, mine, press):
    result = {"policy": candidate, "kept": kept, "heads": 0, "equal": 0}
    result |= {"rows_differ": 0, "no_ties": 0}
    for i, layer in enumerate(layers):
        theirs = layer.scores(press, torch.float32)
        exact = layer.scores(press, torch.float64).double()
        for h in range(theirs.shape[0]):
            head = mine[i * theirs.shape[0] + h]
            assert len(head) == kept, (len(head), kept)
            different, far = compare_head(theirs[h], exact[h], kept, head)
            result["heads"] += 1
            result["equal"] += different == 0
            result["rows_differ"] += different
            result["no_ties"] += far
    return result


def main():
    parser = argparse.ArgumentParser(prog="peer_kvpress")
    parser.add_argument("--tokens", default="1024,333,70")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--json", type=pathlib.Path)
    for name in ("replay", "gguf", "text", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    results = []
    print("tokens  policy       kept  heads  equal  rows that differ  no ties")
    for tokens in map(int, options.tokens.split(",")):
        layers = read_layers(options.gguf, options.text, tokens)
        for name, rows in (
            ("q", [layer.queries.numpy() for layer in layers]),
            ("k", [layer.keys.half().numpy() for layer in layers]),
            ("v", [layer.values.half().numpy() for layer in layers]),
        ):
            np.concatenate(rows).tofile(options.work / f"{name}.bin")
        filters = options.work / "statistics.npz"
        write_filters(filters, layers, ExpectedAttentionPress())
        kept = compute_n_kept(tokens, options.ratio)
        for policy, sinks, recent, make in CANDIDATES:
            if recent >= kept:
                print(f"{tokens:6}  {policy:11}  its window exceeds the budget")
                continue
            press = make(compression_ratio=options.ratio)
            mine = ours(
                options.replay, policy, kept, sinks, recent, layers,
                options.work, filters,
            )
            result = compare(layers, policy, kept, mine, press)
            results.append({"tokens": tokens, **result})
            print(
                f"{tokens:6}  {policy:11}  {kept:4}  {result['heads']:5}"
                f"  {result['equal']:5}  {result['rows_differ']:16}"
                f"  {result['no_ties']:7}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    sys.exit(any(result["no_ties"] for result in results))


if __name__ == "__main__":
    main()
