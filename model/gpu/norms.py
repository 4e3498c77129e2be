"""What lies between the matrix products of a layer: the residual stream with its norms, and the gated activation."""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from model.gpu.launch import Launch
from model.gpu.plan import power
from model.layers import RMSNorm


@triton.jit
def residual(
    x,
    y,
    out,
    after,
    before,
    alpha,
    eps,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    ADDS: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """A row of x becomes x + alpha · norm(y) (AFTER: with that norm), and of out norm(x) (BEFORE)."""
    d = tl.arange(0, PLACES)
    inside = d < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        delta = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            delta *= tl.rsqrt(tl.sum(delta * delta, axis=0) / WIDTH + eps)
            delta *= tl.load(after + d, mask=inside, other=0.0).to(tl.float32)
        value += alpha * delta
        tl.store(x + at, value, mask=inside)
    if BEFORE:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        value *= tl.load(before + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value, mask=inside)


def adding(
    x: Tensor, y: Tensor | None, out: Tensor, *, after: RMSNorm | None, before: RMSNorm | None, alpha: float
) -> Launch:
    """x [rows, width] += alpha · after(y), then out = before(x). A norm may be None, and then changes nothing; `out` is
    written only where there is `before`. All are contiguous, and the two norms have one eps."""
    rows, width = x.shape
    norm = before or after
    places = power(16, width)
    return Launch(
        residual,
        (rows,),
        {
            "x": x,
            "y": x if y is None else y,
            "out": out,
            "after": x if after is None else after.weight,
            "before": x if before is None else before.weight,
            "alpha": alpha,
            "eps": 0.0 if norm is None else norm.eps,
            "WIDTH": width,
            "PLACES": places,
            "ADDS": y is not None,
            "AFTER": after is not None,
            "BEFORE": before is not None,
        },
        warps=min(16, max(1, places // 512)),
    )


@triton.jit
def gate(gate_up, out, WIDTH: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr):
    """A piece of a row: act(gate) · up."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = d < WIDTH
    g = tl.load(gate_up + row * (2 * WIDTH) + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    # 1 + tanh(z) is twice the sigmoid of 2 z.
    slope = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    tl.store(out + row * WIDTH + d, g / (1.0 + tl.exp(-slope)) * up, mask=inside)


def gating(gate_up: Tensor, out: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Launch:
    """gate_up [rows, 2 · width] → out [rows, width], both contiguous; `model.layers.gated`."""
    rows, width = out.shape
    places = min(1024, power(16, width))
    return Launch(
        gate,
        (rows, triton.cdiv(width, places)),
        {"gate_up": gate_up, "out": out, "WIDTH": width, "PLACES": places, "SILU": activation == "silu"},
    )
