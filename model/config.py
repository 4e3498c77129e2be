"""What the decoder needs to know of a model, read through an allow-list. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer."""

    theta: float
    partial_factor: float = 1.0
    """Share of the head that is rotated."""
    scaling: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] = "default"
    parameters: dict[str, float | list[float]] | None = None
    """The scaling's own numbers, under config.json's names."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, in the terms of `model.decoder`. Lengths in tokens or elements."""

    architecture: str
    """As in config.json, e.g. LlamaForCausalLM."""
    native: bool
    """Whether `model.decoder` knows it; else it runs through transformers' modelling code."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    layer_types: tuple[LayerType, ...]
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    """Of sliding layers, where it differs (Gemma 3)."""
    no_rope_layers: frozenset[int] = frozenset()
    """Layers without rotary embedding (SmolLM3)."""
    sliding_window: int | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """head: RMSNorm over each head (Qwen3, Gemma 3); full: over the whole projection (OLMo2)."""
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """pre: before attention and MLP; post: only after them (OLMo2); sandwich: both (Gemma 2 and 3)."""
    norm_offset: float = 0.0
    """Added to every RMSNorm weight (Gemma: 1)."""
    attention_scale: float = 0.0
    """Multiplies q·k; never 0 once read."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    dtype: str = "bfloat16"
    """Of the stored weights, or bfloat16 where they are quantised."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By layer: tokens that a token sees, itself included; None: all."""
        return tuple(self.sliding_window if kind == "sliding" else None for kind in self.layer_types)

    def outgrown(self, longest: int) -> tuple[int | None, ...]:
        """`windows`, without those that hold the longest sequence whole."""
        return tuple(None if window is None or window >= longest else window for window in self.windows)
