"""GGUF metadata in config.json's words, so that one reader with one set of bounds serves both. No torch here.

What llama.cpp's converter leaves out of the file, its loader knows by architecture; so must we (see `gguf_fields`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from model.errors import ModelError
from model.gguf import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""By `general.architecture`. Mistral's files call themselves llama."""

_NAMES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_theta": "rope.freq_base",
}
MAX_LIST = 4096
_WINDOWED = frozenset({"gemma2", "gemma3", "phi3"})
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models: only these scale attention by hidden_size / heads; the file does not say so."""


def gguf_architecture(file: GGUFFile) -> str:
    """`general.architecture`. Raises ModelError for one that cannot be served from GGUF."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: the architecture {str(name)[:40]!r} cannot be served from GGUF; {known} can")
    return name


def gguf_fields(file: GGUFFile) -> dict[str, Any]:
    """The values of the config.json that the file's model once had, still unchecked."""
    arch = gguf_architecture(file)
    meta = _plain(file)
    if meta.get(f"{arch}.expert_count"):
        raise ModelError(f"{file.path}: mixtures of experts cannot be served from GGUF")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: the tensor token_embd.weight is missing or no matrix")
    values: dict[str, Any] = {name: meta.get(f"{arch}.{key}") for name, key in _NAMES.items()}
    values |= {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    per_head = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    values["head_dim"] = values["head_dim"] or per_head
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    window = meta.get(f"{arch}.attention.sliding_window")
    if arch in _WINDOWED:
        values["sliding_window"] = window or None  # 0 says that there is none
    elif window and arch == "olmo2":
        raise ModelError(f"{file.path}: OLMo 3, which has sliding windows, cannot be served from GGUF")
    if arch in _LARGEST_GEMMA:
        is_largest = values["num_hidden_layers"] == _LARGEST_GEMMA[arch]
        values["query_pre_attn_scalar"] = per_head if is_largest else values["head_dim"]
    _add_rope(values, meta, file, arch)
    return {key: value for key, value in values.items() if value is not None or key == "sliding_window"}


def _dtype(file: GGUFFile) -> str:
    kinds = {tensor.format.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _plain(file: GGUFFile) -> dict[str, Any]:
    """The metadata with lists for arrays: where a number should be, a list is merely wrong, but an array is a trap,
    since comparisons with it are arrays too. No list that the configuration needs is longer than the cut."""
    return {
        key: value[:MAX_LIST].tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
    }


def _add_rope(values: dict[str, Any], meta: dict[str, Any], file: GGUFFile, arch: str) -> None:
    """Scalings come as numbers, or as one factor per frequency: Phi-3's two lists, and Llama 3's, which the converter
    has worked out. A list that holds for every length is a longrope whose two lists are the same."""
    scaling: dict[str, Any] = {
        "rope_type": meta.get(f"{arch}.rope.scaling.type"),
        "factor": meta.get(f"{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": meta.get(f"{arch}.rope.scaling.original_context_length"),
        "attention_factor": meta.get(f"{arch}.rope.scaling.attn_factor"),
        "beta_fast": meta.get(f"{arch}.rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.get(f"{arch}.rope.scaling.yarn_beta_slow"),
    }
    if scaling["rope_type"] in (None, "none"):
        scaling = {}
    names = ("rope_freqs.weight",) * 2
    if arch == "phi3":
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if names[0] in file.tensors and names[1] in file.tensors:
        short, long = (_factors(file, name) for name in names)
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": meta.get(f"{arch}.rope.scaling.attn_factor", 1.0),
        }
        original = meta.get(f"{arch}.rope.scaling.original_context_length", values["max_position_embeddings"])
        values["original_max_position_embeddings"] = original
    rotated, head_dim = meta.get(f"{arch}.rope.dimension_count"), values["head_dim"]
    if arch == "phi3" and isinstance(rotated, int) and isinstance(head_dim, int) and head_dim > 0:
        values["partial_rotary_factor"] = rotated / head_dim
    if arch == "gemma3":
        values["rope_scaling"] = scaling
    else:
        values["rope_parameters"] = scaling


def _factors(file: GGUFFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if len(tensor.shape) != 1 or tensor.shape[0] > MAX_LIST:
        raise ModelError(f"{file.path}: the tensor {name} has the shape {list(tensor.shape)}")
    return [float(factor) for factor in file.vector(name)]
