"""GGUF's tensor names and row order, translated to those of a safetensors checkpoint. No torch here."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

PERMUTED = frozenset({"llama", "granite", "smollm3"})
"""Architectures whose q and k rows the converter interleaves, for a rotation of neighbours instead of halves."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_BY_ARCHITECTURE = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": _POST_NORMS,
    "gemma2": _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
}
_IN_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Rotary frequencies, which `gguf_config` reads."""


def safetensors_name(name: str, architecture: str) -> str | None:
    """The tensor's name in a safetensors checkpoint; None for what is no weight; unknown names stay as they are."""
    if _NOT_WEIGHTS.fullmatch(name):
        return None
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return _TOP.get(name, name)
    layer, part, kind = match.groups()
    part = _BY_ARCHITECTURE.get(architecture, {}).get(part) or _LAYER.get(part)
    return f"model.layers.{int(layer)}.{part}.{kind}" if part else name


def row_order(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """For every row of a q or k projection in the original order, where it lies in a permuted GGUF tensor.

    original, per head   a0 a1 a2 … b0 b1 b2 …       rotates (a0, b0), (a1, b1), …
    GGUF                 a0 b0 a1 b1 a2 b2 …
    """
    rows = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)
