"""The rotation before codes (`kvpool.rotation`) for queries, and back for what attention makes of rotated values."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.rotation import rotation
from model.gpu.codes import rotated_half
from model.gpu.launch import Launch, torch_type
from model.gpu.plan import power

ROWS = 16


@cache
def signs(head_dim: int, device: torch.device, dot: tl.dtype) -> Tensor:
    """The rotation without its norm: 0, 1 and -1 [head_dim, head_dim], which every type of `dot` holds exactly."""
    return rotation(head_dim, device).sign().to(torch_type(dot))


@triton.jit(do_not_specialize=["rows"])
def turn(
    x,
    out,
    balance,
    signs,
    rows,
    stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    DOT: tl.constexpr,
    BACK: tl.constexpr,
    BALANCED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Half of out[r] = R x[r], or with BACK Rᵀ x[r], for rows of (token, head); where BALANCED, x is multiplied by
    balance[head // GROUP] first."""
    H: tl.constexpr = DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    mask = (row < rows) & (d < H)
    head = row % HEADS
    at = x + row // HEADS * stride + head * DIM + d
    x0, x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + H, mask=mask, other=0.0).to(tl.float32)
    if BALANCED:
        factor = balance + head // GROUP * DIM + d
        x0, x1 = x0 * tl.load(factor, mask=mask, other=0.0), x1 * tl.load(factor + H, mask=mask, other=0.0)
    half = tl.program_id(1)
    y = rotated_half(x0, x1, half, signs, DIM, HALF, DOT, BACK)
    tl.store(out + row * DIM + half * H + d, y, mask=mask)


def turning(
    x: Tensor, out: Tensor, dot: tl.dtype, *, balance: Tensor | None = None, group: int = 1, back: bool = False
) -> Launch:
    """x [tokens, heads, head_dim], a token's heads contiguous → out, contiguous.

    balance float32 [heads / group, head_dim] multiplies x before.
    """
    tokens, heads, dim = x.shape
    rows = tokens * heads
    return Launch(
        turn,
        (triton.cdiv(rows, ROWS), 2),
        {
            "x": x,
            "out": out,
            "balance": x if balance is None else balance,
            "signs": signs(dim, x.device, dot),
            "rows": rows,
            "stride": x.stride(0),
            "HEADS": heads,
            "GROUP": group,
            "DIM": dim,
            "HALF": power(16, dim // 2),
            "DOT": dot,
            "BACK": back,
            "BALANCED": balance is not None,
            "ROWS": ROWS,
        },
        warps=4 if dim <= 128 else 8,
    )
