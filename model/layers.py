"""Norms, activations and the embedding table."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from model.parallel import Group
from model.precision import Precision

NormStyle = Literal["cast_then_scale", "scale_then_cast"]
"""Where 16-bit rounding happens. cast_then_scale: Llama and its kin; scale_then_cast: Gemma and OLMo2."""


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · (weight + offset), statistics in float32, over the last dimensions of `weight`'s kind.

    `weight` has shape [n], or [heads, n] where each head has its own; x is [..., n] or [..., heads, n].
    """

    __slots__ = ("eps", "nbytes", "plain", "style", "weight")

    def __init__(self, weight: Tensor, eps: float, offset: float, style: NormStyle, compute: torch.dtype) -> None:
        wide = weight.float() + offset if offset else weight.float()
        self.style = style
        self.eps = eps
        self.weight = wide if style == "scale_then_cast" else wide.to(compute)
        self.plain = compute == torch.float32 and weight.dim() == 1
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor, squares: Tensor | None = None) -> Tensor:
        """`squares`: the mean of x², float32 [..., 1], where x is only a part of what is normed."""
        if self.plain and squares is None:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        if squares is None:
            squares = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(squares + self.eps)
        if self.style == "scale_then_cast":
            return (wide * self.weight).to(x.dtype)
        return wide.to(x.dtype) * self.weight


class Embedding:
    """Token id → row of `table` [vocab, hidden], widened to the compute type and multiplied.

    With a `group` each rank has the rows of some tokens, from `first` on, and gives zeros for the others; so the sum
    over the ranks is exact.
    """

    __slots__ = ("compute", "first", "group", "multiplier", "nbytes", "table")

    def __init__(
        self, table: Tensor, multiplier: float, precision: Precision, first: int = 0, group: Group | None = None
    ) -> None:
        self.table = table
        self.multiplier = multiplier
        self.compute = precision.compute
        self.nbytes = table.nbytes
        self.first = first
        self.group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden] in the compute type; the result is the caller's to change."""
        if self.group is None:
            rows = self.table.index_select(0, token_ids).to(self.compute)
        else:
            places, most = token_ids - self.first, len(self.table) - 1
            rows = self.table.index_select(0, places.clamp(0, most)).to(self.compute)
            rows = self.group.sum(rows.masked_fill_(((places < 0) | (places > most)).unsqueeze(1), 0.0))
        return rows if self.multiplier == 1.0 else rows.mul_(self.multiplier)


def gated(gate_up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """act(gate) · up for gate_up [rows, 2 · intermediate] → [rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
