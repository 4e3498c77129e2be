"""Rotary embedding of a transformers model whose factors depend on the length of a sequence, in a packed step."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.errors import ModelError

lengths: contextvars.ContextVar[Tensor] = contextvars.ContextVar("octavo_lengths")
"""Known tokens of each token's sequence, [T]."""


def follow_lengths(module: Any) -> int | None:
    """Make longrope choose its factors for each sequence, not by the largest position of the whole step.

    Returns `RopeTable.switch`. transformers' other scalings depend on no length below max_position_embeddings.
    """
    switch: int | None = None
    for rope in module.modules():
        kind = getattr(rope, "rope_type", None)
        if isinstance(kind, dict) and "longrope" in kind.values():
            raise ModelError(f"{type(module).__name__} has longrope for some of its layers only")
        if kind != "longrope":
            continue
        switch = int(rope.config.rope_parameters["original_max_position_embeddings"])
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](rope.config, seq_len=switch + 1)
        rope.forward = _longrope(rope.original_inv_freq, long, rope.attention_scaling, switch)
    return switch


def _longrope(short: Tensor, long: Tensor, factor: float, switch: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        is_long = (lengths.get() > switch)[None, :, None]
        frequencies = torch.where(is_long, long.to(x.device), short.to(x.device))
        angles = position_ids[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * factor).to(x.dtype), (both.sin() * factor).to(x.dtype)

    return forward
