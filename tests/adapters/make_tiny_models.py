#!/usr/bin/env python3
"""make_tiny_models.py OUT_DIR: GGUF files with random weights for the tests.

One file per kind of model that the engine must serve or refuse. llama.cpp
loads and runs all of them. They have a width of 64, 4 query heads of dimension
16 and a vocabulary of single bytes, so every text has tokens. The same call
always writes the same bytes.
"""

import os
import sys
import zlib
from pathlib import Path

import gguf
import numpy as np

EMBD = 64
FF = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
EXPERTS = 2
CONTEXT = 2048

SPECIAL = [b"<unk>", b"<s>", b"</s>"]
BYTES = [b"<0x%02X>" % byte for byte in range(256)]
VOCAB = SPECIAL + BYTES


class TinyModel:
    """A GGUF file in the making; shapes are in ggml's order, width first."""

    def __init__(self, name, arch, layers=2, heads=HEADS, kv_heads=KV_HEADS,
                 head=True, tied=False):
        self.name = name
        self.arch = arch
        self.layers = layers
        self._random = np.random.default_rng(zlib.crc32(name.encode()))
        self._writer = gguf.GGUFWriter(None, arch)
        self._writer.add_name(name)
        self._writer.add_context_length(CONTEXT)
        self._writer.add_embedding_length(EMBD)
        self._writer.add_feed_forward_length(FF)
        self._writer.add_block_count(layers)
        self._writer.add_head_count(heads)
        self._writer.add_head_count_kv(kv_heads)
        self._add_vocabulary()
        self.weight("token_embd", EMBD, len(VOCAB))
        if head:
            self.norm("output_norm")
        if head and not tied:
            self.weight("output", EMBD, len(VOCAB))

    def _add_vocabulary(self):
        kinds = gguf.TokenType
        self._writer.add_tokenizer_model("llama")
        self._writer.add_token_list(VOCAB)
        self._writer.add_token_scores([0.0] * len(VOCAB))
        self._writer.add_token_types(
            [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
            + [kinds.BYTE] * len(BYTES))
        self._writer.add_bos_token_id(1)
        self._writer.add_eos_token_id(2)

    def key(self, key, value):
        """A key below the architecture's name; the type follows the value."""
        key = f"{self.arch}.{key}"
        if isinstance(value, bool):
            self._writer.add_bool(key, value)
        elif isinstance(value, int):
            self._writer.add_uint32(key, value)
        elif isinstance(value, float):
            self._writer.add_float32(key, value)
        elif isinstance(value, str):
            self._writer.add_string(key, value)
        else:
            self._writer.add_array(key, value)

    def add_token_type_count(self, count):
        self._writer.add_token_type_count(count)

    def tensor(self, name, values):
        self._writer.add_tensor(name, values.astype(np.float32))

    def weight(self, name, *shape):
        """Keeps the size of activations: variance is one over the width."""
        values = self._random.standard_normal(shape[::-1])
        self.tensor(f"{name}.weight", values / np.sqrt(shape[0]))

    def bias(self, name, *shape):
        values = self._random.standard_normal(shape[::-1])
        self.tensor(f"{name}.bias", 0.1 * values)

    def norm(self, name, width=EMBD):
        values = 1 + 0.1 * self._random.standard_normal(width)
        self.tensor(f"{name}.weight", values)

    def attention(self, layer, kv_heads=KV_HEADS, norm=True):
        if norm:
            self.norm(f"{layer}.attn_norm")
        self.weight(f"{layer}.attn_q", EMBD, HEADS * HEAD_DIM)
        self.weight(f"{layer}.attn_k", EMBD, kv_heads * HEAD_DIM)
        self.weight(f"{layer}.attn_v", EMBD, kv_heads * HEAD_DIM)
        self.weight(f"{layer}.attn_output", HEADS * HEAD_DIM, EMBD)

    def feed_forward(self, layer):
        self.norm(f"{layer}.ffn_norm")
        self.weight(f"{layer}.ffn_gate", EMBD, FF)
        self.weight(f"{layer}.ffn_up", EMBD, FF)
        self.weight(f"{layer}.ffn_down", FF, EMBD)

    def experts(self, layer):
        self.weight(f"{layer}.ffn_gate_inp", EMBD, EXPERTS)
        self.weight(f"{layer}.ffn_gate_exps", EMBD, FF, EXPERTS)
        self.weight(f"{layer}.ffn_up_exps", EMBD, FF, EXPERTS)
        self.weight(f"{layer}.ffn_down_exps", FF, EMBD, EXPERTS)

    def mamba(self, layer, inner, state, rank, kernel):
        self.norm(f"{layer}.attn_norm")
        self.weight(f"{layer}.ssm_in", EMBD, 2 * inner)
        self.weight(f"{layer}.ssm_conv1d", kernel, inner)
        self.bias(f"{layer}.ssm_conv1d", inner)
        self.weight(f"{layer}.ssm_x", inner, rank + 2 * state)
        self.weight(f"{layer}.ssm_dt", rank, inner)
        self.bias(f"{layer}.ssm_dt", inner)
        # Negative, so that the state decays.
        self.tensor(f"{layer}.ssm_a", -np.ones((inner, state)))
        self.tensor(f"{layer}.ssm_d", np.ones(inner))
        self.weight(f"{layer}.ssm_out", inner, EMBD)

    def blocks(self):
        return [f"blk.{i}" for i in range(self.layers)]

    def write(self, folder):
        path = folder / f"{self.name}.gguf"
        unfinished = path.with_suffix(".part")
        self._writer.write_header_to_file(unfinished)
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        os.replace(unfinished, path)


def llama_ok():
    """The plain case, grouped queries, and the one that must be served."""
    return llama_like("llama_ok")


def llama_like(name):
    model = TinyModel(name, "llama")
    model.key("attention.layer_norm_rms_epsilon", 1e-5)
    model.key("rope.freq_base", 10000.0)
    for layer in model.blocks():
        model.attention(layer)
        model.feed_forward(layer)
    return model


def yarn():
    """Served, but its RoPE is more than a turn by a steady angle."""
    model = llama_like("yarn")
    model.key("rope.scaling.type", "yarn")
    model.key("rope.scaling.factor", 4.0)
    model.key("rope.scaling.original_context_length", CONTEXT // 4)
    return model


def rope_factors():
    """Each pair turns slower by a factor of its own, all by linear scaling."""
    model = llama_like("rope_factors")
    model.key("rope.scaling.type", "linear")
    model.key("rope.scaling.factor", 2.0)
    model.tensor("rope_freqs.weight", 1 + 2 * np.arange(HEAD_DIM // 2))
    return model


def gemma(name, arch, tied):
    """Layers with a standard sliding window of 32, every second one without."""
    model = TinyModel(name, arch, layers=4, tied=tied)
    model.key("attention.layer_norm_rms_epsilon", 1e-6)
    model.key("attention.key_length", HEAD_DIM)
    model.key("attention.value_length", HEAD_DIM)
    model.key("attention.sliding_window", 32)
    model.key("attention.sliding_window_pattern", 2)
    for layer in model.blocks():
        model.attention(layer)
        model.norm(f"{layer}.post_attention_norm")
        model.feed_forward(layer)
        model.norm(f"{layer}.post_ffw_norm")
    return model


def gemma_swa():
    """Windows, and norms on queries and keys."""
    model = gemma("gemma_swa", "gemma3", tied=False)
    for layer in model.blocks():
        model.norm(f"{layer}.attn_q_norm", HEAD_DIM)
        model.norm(f"{layer}.attn_k_norm", HEAD_DIM)
    return model


def softcap():
    """Windows, and attention logits capped by a tanh."""
    model = gemma("softcap", "gemma2", tied=True)
    model.key("attn_logit_softcapping", 50.0)
    model.key("final_logit_softcapping", 30.0)
    return model


def shared_kv():
    """The last two layers read the caches of the first two."""
    model = TinyModel("shared_kv", "gemma4", layers=4)
    model.key("attention.layer_norm_rms_epsilon", 1e-6)
    for key in ("key_length", "value_length"):
        model.key(f"attention.{key}", HEAD_DIM)
        model.key(f"attention.{key}_swa", HEAD_DIM)
    model.key("attention.sliding_window", 32)
    model.key("attention.sliding_window_pattern", [True, False, True, False])
    model.key("attention.shared_kv_layers", 2)
    model.key("embedding_length_per_layer_input", 0)
    model.tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2))
    for layer in model.blocks():
        model.attention(layer)
        model.norm(f"{layer}.attn_q_norm", HEAD_DIM)
        model.norm(f"{layer}.attn_k_norm", HEAD_DIM)
        model.norm(f"{layer}.post_attention_norm")
        model.feed_forward(layer)
        model.norm(f"{layer}.post_ffw_norm")
    return model


def mamba():
    """Recurrent: no attention at all."""
    model = TinyModel("mamba", "mamba", heads=0, kv_heads=0)
    add_mamba_keys(model)
    for layer in model.blocks():
        model.mamba(layer, inner=2 * EMBD, state=16, rank=4, kernel=4)
    return model


def hybrid():
    """One recurrent layer, one attention layer."""
    model = TinyModel("hybrid", "jamba", kv_heads=[0, KV_HEADS])
    add_mamba_keys(model)
    recurrent, attention = model.blocks()
    model.mamba(recurrent, inner=2 * EMBD, state=16, rank=4, kernel=4)
    model.norm(f"{recurrent}.ssm_dt_norm", 4)
    model.norm(f"{recurrent}.ssm_b_norm", 16)
    model.norm(f"{recurrent}.ssm_c_norm", 16)
    model.attention(attention)
    for layer in model.blocks():
        model.feed_forward(layer)
    return model


def add_mamba_keys(model):
    model.key("attention.layer_norm_rms_epsilon", 1e-5)
    model.key("ssm.conv_kernel", 4)
    model.key("ssm.inner_size", 2 * EMBD)
    model.key("ssm.state_size", 16)
    model.key("ssm.time_step_rank", 4)


def bert():
    """An encoder: attention in both directions, no cache."""
    model = TinyModel("bert", "bert", kv_heads=HEADS, head=False)
    model.key("attention.layer_norm_epsilon", 1e-12)
    model.key("attention.causal", False)
    model.key("pooling_type", int(gguf.PoolingType.MEAN))
    model.add_token_type_count(2)
    model.weight("token_types", EMBD, 2)
    model.weight("position_embd", EMBD, CONTEXT)
    model.norm("token_embd_norm")
    model.bias("token_embd_norm", EMBD)
    for layer in model.blocks():
        model.attention(layer, kv_heads=HEADS, norm=False)
        model.norm(f"{layer}.attn_output_norm")
        model.bias(f"{layer}.attn_output_norm", EMBD)
        model.weight(f"{layer}.ffn_up", EMBD, FF)
        model.weight(f"{layer}.ffn_down", FF, EMBD)
        model.norm(f"{layer}.layer_output_norm")
        model.bias(f"{layer}.layer_output_norm", EMBD)
    return model


def longrope():
    """RoPE factors that depend on the length of the context."""
    model = TinyModel("longrope", "phi3")
    model.key("attention.layer_norm_rms_epsilon", 1e-5)
    model.key("rope.dimension_count", HEAD_DIM)
    model.key("rope.scaling.type", "longrope")
    model.key("rope.scaling.original_context_length", 1024)
    model.key("rope.scaling.attn_factor", 1.1)
    model.tensor("rope_factors_long.weight", np.linspace(1, 4, HEAD_DIM // 2))
    model.tensor("rope_factors_short.weight", np.ones(HEAD_DIM // 2))
    for layer in model.blocks():
        model.attention(layer)
        model.norm(f"{layer}.ffn_norm")
        model.weight(f"{layer}.ffn_up", EMBD, 2 * FF)  # gate and up in one
        model.weight(f"{layer}.ffn_down", FF, EMBD)
    return model


def alibi():
    """Positions as a bias on the attention logits instead of RoPE."""
    model = TinyModel("alibi", "bloom", kv_heads=HEADS)
    model.key("attention.layer_norm_epsilon", 1e-5)
    model.norm("token_embd_norm")
    model.bias("token_embd_norm", EMBD)
    model.bias("output_norm", EMBD)
    for layer in model.blocks():
        model.norm(f"{layer}.attn_norm")
        model.bias(f"{layer}.attn_norm", EMBD)
        model.weight(f"{layer}.attn_qkv", EMBD, 3 * EMBD)
        model.bias(f"{layer}.attn_qkv", 3 * EMBD)
        model.weight(f"{layer}.attn_output", EMBD, EMBD)
        model.bias(f"{layer}.attn_output", EMBD)
        model.norm(f"{layer}.ffn_norm")
        model.bias(f"{layer}.ffn_norm", EMBD)
        model.weight(f"{layer}.ffn_up", EMBD, FF)
        model.bias(f"{layer}.ffn_up", FF)
        model.weight(f"{layer}.ffn_down", FF, EMBD)
        model.bias(f"{layer}.ffn_down", EMBD)
    return model


def sinks():
    """A learned attention sink per head, and windows of 32."""
    model = TinyModel("sinks", "gpt-oss")
    model.key("attention.layer_norm_rms_epsilon", 1e-5)
    model.key("attention.sliding_window", 32)
    model.key("rope.dimension_count", HEAD_DIM)
    model.key("expert_count", EXPERTS)
    model.key("expert_used_count", 1)
    model.key("expert_feed_forward_length", FF)
    for layer in model.blocks():
        model.attention(layer)
        model.bias(f"{layer}.attn_output", EMBD)
        model.tensor(f"{layer}.attn_sinks.weight", np.linspace(-1, 1, HEADS))
        model.norm(f"{layer}.post_attention_norm")
        model.experts(layer)
        model.bias(f"{layer}.ffn_gate_inp", EXPERTS)
        model.bias(f"{layer}.ffn_gate_exps", FF, EXPERTS)
        model.bias(f"{layer}.ffn_up_exps", FF, EXPERTS)
        model.bias(f"{layer}.ffn_down_exps", EMBD, EXPERTS)
    return model


def chunked():
    """Three layers with a chunked window (8,192, fixed by llama.cpp)."""
    model = TinyModel("chunked", "llama4", layers=4)
    model.key("attention.layer_norm_rms_epsilon", 1e-5)
    model.key("rope.dimension_count", HEAD_DIM)
    model.key("expert_count", EXPERTS)
    model.key("expert_used_count", 1)
    model.key("expert_feed_forward_length", FF)
    model.key("interleave_moe_layer_step", 4)  # experts in the last layer only
    for layer in model.blocks():
        model.attention(layer)
        if layer != model.blocks()[-1]:
            model.feed_forward(layer)
            continue
        model.norm(f"{layer}.ffn_norm")
        model.experts(layer)
        model.weight(f"{layer}.ffn_gate_shexp", EMBD, FF)
        model.weight(f"{layer}.ffn_up_shexp", EMBD, FF)
        model.weight(f"{layer}.ffn_down_shexp", FF, EMBD)
    return model


def mla():
    """Latent attention: one compressed key and value for all heads."""
    latent, rope, nope = 32, 8, 8
    model = TinyModel("mla", "deepseek2", kv_heads=1)
    model.key("attention.layer_norm_rms_epsilon", 1e-6)
    model.key("attention.q_lora_rank", 0)
    model.key("attention.kv_lora_rank", latent)
    model.key("attention.key_length", latent + rope)
    model.key("attention.value_length", latent)
    model.key("attention.key_length_mla", nope + rope)
    model.key("attention.value_length_mla", HEAD_DIM)
    model.key("rope.dimension_count", rope)
    model.key("leading_dense_block_count", model.layers)
    model.key("expert_feed_forward_length", FF)
    model.key("expert_shared_count", 1)
    for layer in model.blocks():
        model.norm(f"{layer}.attn_norm")
        model.weight(f"{layer}.attn_q", EMBD, HEADS * (nope + rope))
        model.weight(f"{layer}.attn_kv_a_mqa", EMBD, latent + rope)
        model.norm(f"{layer}.attn_kv_a_norm", latent)
        model.weight(f"{layer}.attn_k_b", nope, latent, HEADS)
        model.weight(f"{layer}.attn_v_b", latent, HEAD_DIM, HEADS)
        model.weight(f"{layer}.attn_output", HEADS * HEAD_DIM, EMBD)
        model.feed_forward(layer)
    return model


def mrope():
    """Positions of several dimensions, as for images."""
    model = TinyModel("mrope", "qwen2vl")
    model.key("attention.layer_norm_rms_epsilon", 1e-6)
    model.key("rope.dimension_count", HEAD_DIM)
    model.key("rope.dimension_sections", [4, 2, 2, 0])
    for layer in model.blocks():
        model.attention(layer)
        model.feed_forward(layer)
    return model


MODELS = [
    llama_ok, yarn, rope_factors, gemma_swa, softcap, shared_kv, mamba, hybrid,
    bert, longrope, alibi, sinks, chunked, mla, mrope,
]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_tiny_models.py OUT_DIR")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for make in MODELS:
        make().write(folder)


if __name__ == "__main__":
    main()
