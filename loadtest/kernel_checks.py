"""The kernels for a GPU against float64, where they will run: python -m loadtest.device begins with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool.formats import FORMATS, KVLayout
from kvpool.rotation import rotation
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.batch import Batch, Row
from model.gpu.norms import adding, gating
from model.gpu.write import writing
from model.inputs import InputBuilder, StepInputs
from model.layers import RMSNorm, gated
from model.params import SamplingParams
from model.rope import rotate

ROWS = [(700, 1), (0, 1), (63, 1), (2000, 1), (120, 4), (0, 90), (333, 70)]
"""(start, count): decode rows, one with a context that is split; a draft, a prompt and a chunk."""
SHAPES = ((32, 8, 128), (9, 3, 64), (8, 8, 96), (8, 4, 256))
"""(heads, kv_heads, head size). Halves of 96 are padded: masks, which no interpreter shows beside assembly."""
KINDS = [(None, None), (30.0, 100)]
"""(cap, window)"""


@dataclass(frozen=True, slots=True)
class Check:
    """`error`: the largest, relative to the largest expected value; NaN where a kernel could not be run."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN is not


def checks(attention: Attention, dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[Check]:
    """`small`: few shapes of few tokens, for the interpreter."""
    rows = [(70, 1), (0, 5)] if small else ROWS
    kinds = [(None, None)] if small else KINDS
    for number, (heads, kv_heads, dim) in enumerate([(4, 2, 32)] if small else SHAPES):
        for place, kv in enumerate(FORMATS):
            # Kernels are compiled for seconds each: of the other shapes every second combination.
            for softcap, window in kinds if number == 0 else [kinds[(number + place) % len(kinds)]]:
                made = _attention(attention, rows, (heads, kv_heads, dim), kv, softcap, window, dtype, device)
                yield from _guarded(made, f"{heads}/{kv_heads}x{dim} {kv}")
    for width in (96,) if small else (576, 4096, 14_336):
        yield from _guarded(_between(width, dtype, device), f"width {width}")


def _guarded(made: Iterator[Check], name: str) -> Iterator[Check]:
    """What raises has failed, and keeps nobody from the other checks."""
    try:
        yield from made
    except Exception as error:
        yield Check(f"{name}: {one_line(error)}", math.nan, 0.0)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _attention(
    attention: Attention,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    kv: str,
    softcap: float | None,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Check]:
    """What is written, by the kernel and by torch; and what attention makes of it, by the kernel and in float64."""
    heads, kv_heads, dim = shape
    lengths = [start + count for start, count in rows]
    blocks = [up // 16 + 1 for up in lengths]
    storage, plain = (KVStorage(KVLayout(1, kv_heads, dim, FORMATS[kv]), sum(blocks) + 1, device) for _ in range(2))
    for pool in (storage, plain):
        if pool.fit is not None:
            balance = torch.linspace(0.3, 3.0, dim, device=device).expand(1, kv_heads, dim)
            pool.fit.data.copy_(torch.stack([balance - 1, 1 / balance, balance, balance.flip(-1) - 1], 1))
    batch = [
        Row([0] * n, n, start, n - start, list(range(sum(blocks[:i]) + 1, sum(blocks[: i + 1]) + 1)), _PARAMS)
        for i, ((start, _), n) in enumerate(zip(rows, lengths, strict=True))
    ]
    whole = InputBuilder(sum(lengths), 16, device).build(Batch([_from_start(row) for row in batch]))
    step = InputBuilder(sum(count for _, count in rows), 16, device).build(Batch(batch))
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    norm = RMSNorm(torch.rand(heads + kv_heads, dim, device=device) + 0.5, 1e-6, 0.0, "scale_then_cast", dtype)
    angles = torch.rand(sum(lengths), 1, dim // 2, device=device) * 6
    cos_sin = angles.cos(), angles.sin()
    query = torch.empty(sum(lengths), heads, dim, device=device, dtype=dtype)
    writing(qkv, query, storage, 0, whole, norm=norm, cos_sin=cos_sin).run()
    qk = rotate(norm(qkv[:, : heads + kv_heads].float()), *cos_sin)
    plain.write_at(0, qk[:, heads:], qkv[:, heads + kv_heads :], whole.blocks, whole.offsets)
    name = f"{heads}/{kv_heads}x{dim} {kv}"
    for part in ("keys", "values"):
        found, expected = (_read(pool, part, whole, kv_heads) for pool in (storage, plain))
        off = (found - expected).abs() > 0.02 * expected.abs().amax(-1, keepdim=True)
        yield Check(f"write {part} {name}", float(off.double().mean()), 2e-3)
    wanted = qk[:, :heads].double()
    if storage.fit is not None:
        fitted = storage.fit.query(0, wanted.reshape(len(wanted), kv_heads, -1, dim)).flatten(1, 2)
        wanted = fitted @ rotation(dim, device).double().T
    allowed = 1e-4 if dtype == torch.float32 else 2e-2
    yield Check(f"write query {name}", float((query.double() - wanted).abs().max() / wanted.abs().max()), allowed)

    query = qk[:, :heads].to(dtype)[_chosen(rows, lengths).to(device)]
    out = attention(query, storage, 0, step, scale=dim**-0.5, window=window, softcap=softcap)
    k, v = (_turned_back(storage, part, whole, kv_heads) for part in ("keys", "values"))
    wanted = query.double()
    if storage.fit is not None:
        k = k * storage.fit.data[0, 2].double()  # without the shift, which moves all scores of a query alike
    begin = first = 0
    expected = torch.empty_like(wanted)
    for (start, count), length in zip(rows, lengths, strict=True):
        q = wanted[first : first + count].view(count, kv_heads, -1, dim)
        scores = torch.einsum("tkgd,nkd->kgtn", q, k[begin : begin + length]) * dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        n = torch.arange(length, device=device)
        position = torch.arange(start, length, device=device)[:, None]
        hidden = (n > position) | (n <= position - (window or length))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        made = torch.einsum("kgtn,nkd->tkgd", weights, v[begin : begin + length])
        expected[first : first + count] = made.reshape(count, heads, dim)
        begin, first = begin + length, first + count
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    yield Check(f"attention {name}{' window, cap' * (window is not None)}", error, allowed)


def _between(width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    x, y = (torch.randn(5, width, device=device, dtype=dtype) for _ in range(2))
    norms = [RMSNorm(torch.rand(width, device=device), 1e-6, 0.0, "scale_then_cast", dtype) for _ in range(2)]
    stream = x.double() + norms[0](y.double().float()).double()
    out = torch.empty_like(x)
    adding(x, y, out, after=norms[0], before=norms[1], alpha=1.0).run()
    expected = norms[1](stream.float()).double()
    allowed = 1e-5 if dtype == torch.float32 else 1e-2
    yield Check(f"residual {width}", float((out.double() - expected).abs().max() / expected.abs().max()), allowed)
    both = torch.randn(5, 2 * width, device=device, dtype=dtype)
    gating(both, out, "silu").run()
    expected = gated(both.double(), "silu")
    yield Check(f"gate {width}", float((out.double() - expected).abs().max() / expected.abs().max()), allowed)


_PARAMS = SamplingParams(max_tokens=1, seed=0)


def _from_start(row: Row) -> Row:
    return Row(row.tokens, row.prompt_len, 0, len(row.tokens), row.blocks, row.params)


def _chosen(rows: list[tuple[int, int]], lengths: list[int]) -> Tensor:
    """Which tokens of the whole sequences the step's queries are."""
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.cat(
        [torch.arange(begin + start, begin + start + count) for begin, (start, count) in zip(begins, rows, strict=True)]
    )


def _read(pool: KVStorage, part: str, inputs: StepInputs, kv_heads: int) -> Tensor:
    """What the pool holds of each token, float32 [tokens, kv_heads, head_dim]."""
    device, plane = inputs.blocks.device, pool.keys if part == "keys" else pool.values
    sink = pool.fit.sink(0) if pool.fit is not None and part == "keys" else None
    tiles = (inputs.blocks[:, None] * kv_heads + torch.arange(kv_heads, device=device)).flatten()
    found = plane.read(0, tiles, sink).view(len(inputs.blocks), kv_heads, plane.block_size, plane.head_dim)
    return found[torch.arange(len(found), device=device), :, inputs.offsets]


def _turned_back(pool: KVStorage, part: str, inputs: StepInputs, kv_heads: int) -> Tensor:
    found = _read(pool, part, inputs, kv_heads).double()
    plane = pool.keys if part == "keys" else pool.values
    rotated = plane.codec is not None and plane.codec.rotated
    return found @ rotation(plane.head_dim, found.device).double() if rotated else found
