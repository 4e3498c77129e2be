"""Attention in plain torch, for any device: the oracle of the kernels, and what runs where there are none.

Rows are gathered in groups, each one batched multiplication, never one call a row:

    decode rows, sorted by context     ▏▏▏▏▏▏▏▏ ▏▏▏▏▏▏ ▏▏▏▏    one group per ≤ 25 % of padding
    chunks of equal count              the same, with count queries a row
    a long chunk                       cut into tiles of queries, each with the keys that it can see

A layer's pool is seen as tiles, so that one `index_select` with (block · kv_heads + head) yields contiguous keys
[rows · kv_heads, keys, head_dim]. Where they are rotated, so is the query; where values are, the result is turned back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpool.plane import Plane
from kvpool.rotation import rotation
from kvpool.storage import KVStorage
from model.inputs import Ints, StepInputs, to_device

PADDING = 1.25
"""The longest row of a group has at most so many times the blocks of its shortest, and one more."""
SCORES = 1 << 22
"""Most scores of a group: 16 MiB of float32. A single query with more of them than that is still one group."""
VECTORS = 1 << 16
"""Most keys that several rows gather together, counted per head: 16 MiB of float32 where a head has 64 elements."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows computed together: `rows` of `count` queries each over `keys` keys each (a multiple of the block size)."""

    tokens: Tensor
    """[rows · count] index of each query among the step's tokens."""
    rows: int
    count: int
    keys: int
    tiles: Tensor
    """[rows · kv_heads · keys / block_size] tiles to gather, row by row, head by head."""
    bias: Tensor
    """[rows, 1, 1, count, keys] float32: 0 where a query sees a key, -inf where not."""


class ReferenceAttention:
    """See `model.attention.base.Attention`. Temporary memory: the gathered keys and values of one group, its scores."""

    name = "reference"
    reads_unwritten = True

    def __call__(
        self,
        query: Tensor,
        storage: KVStorage,
        layer: int,
        inputs: StepInputs,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        kv_heads, heads = storage.k[layer].shape[1], query.shape[1]
        groups = inputs.plan(("reference", window, kv_heads, heads), lambda: plan(inputs, window, kv_heads, heads))
        out = torch.empty_like(query)
        for group in groups:
            attended = _attend(_pick(query, group), storage, layer, group, scale, softcap)
            out.index_copy_(0, group.tokens, attended.to(query.dtype))
        return out


def plan(inputs: StepInputs, window: int | None, kv_heads: int, heads: int) -> list[Group]:
    """Cut a step into groups, for layers of one window."""
    size = inputs.block_size
    first = np.maximum(inputs.starts - window + 1, 0) // size if window else np.zeros_like(inputs.starts)
    spans = -(-inputs.contexts // size) - first
    groups = []
    for count in sorted(set(inputs.counts.tolist())):
        rows = np.flatnonzero(inputs.counts == count)
        rows = rows[np.argsort(spans[rows], kind="stable")]
        blocks = spans[rows].tolist()
        begin = 0
        for end in range(1, len(blocks) + 1):
            if end < len(blocks):
                keys = (end + 1 - begin) * blocks[end] * size
                padded = blocks[end] > blocks[begin] * PADDING + 1
                if not padded and keys * count * heads <= SCORES and keys * kv_heads <= VECTORS:
                    continue
            groups += _tiled(inputs, rows[begin:end], count, blocks[end - 1], window, kv_heads, heads)
            begin = end
    return groups


def _tiled(
    inputs: StepInputs, rows: Ints, count: int, blocks: int, window: int | None, kv_heads: int, heads: int
) -> list[Group]:
    """One group, or where one row alone has too many scores, several with a part of its queries each."""
    step = count
    if len(rows) == 1:
        tiles = -(-count * heads * blocks * inputs.block_size // SCORES)
        step = max(1, -(-count // tiles))
    return [_group(inputs, rows, first, min(first + step, count), window, kv_heads) for first in range(0, count, step)]


def _group(inputs: StepInputs, rows: Ints, first: int, end: int, window: int | None, kv_heads: int) -> Group:
    """Queries first … end - 1 of each of `rows`."""
    size, device = inputs.block_size, inputs.device
    starts = inputs.starts[rows]
    offsets = np.maximum(starts + first - window + 1, 0) // size if window else np.zeros_like(starts)
    blocks = int((-(-(starts + end) // size) - offsets).max())
    columns = offsets[:, None] + np.arange(blocks)
    # A shorter row reads the null block where it has no block; the bias hides those keys.
    inside = columns * size < (starts + end)[:, None]
    columns = np.where(inside, columns, 0)
    table = np.where(inside, np.take_along_axis(inputs.tables[rows], columns, axis=1), 0)
    tiles = table[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]
    tokens = inputs.row_starts[rows][:, None] + np.arange(first, end)

    positions = to_device((starts + first)[:, None] + np.arange(end - first), device)[:, :, None]
    seen = to_device(offsets * size, device)[:, None, None] + torch.arange(blocks * size, device=device)
    hidden = seen > positions
    if window:
        hidden |= seen <= positions - window
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=device).masked_fill_(hidden, -torch.inf)
    return Group(
        tokens=to_device(tokens.reshape(-1), device),
        rows=len(rows),
        count=end - first,
        keys=blocks * size,
        tiles=to_device(tiles.reshape(-1), device),
        bias=bias[:, None, None],
    )


def _pick(query: Tensor, group: Group) -> Tensor:
    """The group's queries, [rows, count, heads, head_dim]."""
    return query.index_select(0, group.tokens).view(group.rows, group.count, *query.shape[1:])


def _attend(query: Tensor, storage: KVStorage, layer: int, group: Group, scale: float, softcap: float | None) -> Tensor:
    """[rows, count, heads, head_dim] → [rows · count, heads, head_dim] float32."""
    rows, count, heads, dim = query.shape
    kv_heads = storage.k[layer].shape[1]
    shared = heads // kv_heads
    batch = rows * kv_heads

    # [rows · kv_heads, shared · count, head_dim]: all queries that read the same keys are rows of one matrix.
    q = query.view(rows, count, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(batch, shared * count, dim)
    q, sink = q.float() * scale, None
    if storage.fit is not None:
        q = storage.fit.query(layer, q.view(rows, kv_heads, -1, dim)).view(q.shape)
        sink = storage.fit.sink(layer)
    if _rotated(storage.keys):
        q = q @ rotation(dim, q.device).T
    k = storage.keys.read(layer, group.tiles, sink).view(batch, group.keys, dim)
    v = storage.values.read(layer, group.tiles).view(batch, group.keys, dim)

    scores = torch.bmm(q, k.transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(rows, kv_heads, shared, count, group.keys).add_(group.bias)
    out = torch.bmm(torch.softmax(scores, dim=-1), v)
    if _rotated(storage.values):
        out = out @ rotation(dim, out.device)
    return out.view(rows, kv_heads, shared, count, dim).permute(0, 3, 1, 2, 4).reshape(rows * count, heads, dim)


def _rotated(plane: Plane) -> bool:
    return plane.codec is not None and plane.codec.rotated


def clean(storage: KVStorage, blocks: Tensor) -> None:
    """Zero `blocks` in every layer, before a step writes to them.

    This backend multiplies hidden values by zero, so slots that nobody wrote must hold finite numbers, not what a
    request with broken numbers left behind.
    """
    if blocks.numel():
        storage.zero(blocks)
