"""Attention over the pool: one kernel for prompts, chunks, drafts and decode, and one that joins split contexts.

    a tile of queries     the GROUP heads that read one key head, of as many neighbouring queries as fit: [ROWS, dim]
    an item of work       such a tile and a range of its keys; which there are: `model.gpu.plan`
    its keys              taken TILE at a time from wherever their blocks lie, with the softmax that goes along

Scales of codes multiply columns of scores, and of the weights of values; tiles are never rescaled. The score of a key
whose scale is below zero is beside the query's with the sink (`kvpool.fit`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.plane import Plane
from kvpool.storage import KVStorage
from model.gpu.codes import halves, scale_at
from model.gpu.launch import INTERPRETED, Launch, dot_type
from model.gpu.plan import COLUMNS, Plan, Work, power

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["count", "window"])
def attend(
    query,
    keys,
    values,
    sink,
    out,
    parts,
    weights,
    items,
    row_starts,
    starts,
    gone,
    tables,
    count,
    width,
    stride,
    scale,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """One item for one key head.

    query [tokens, KV_HEADS · GROUP, DIM], rotated where keys are; out likewise, contiguous. A part of a context goes to
    parts float32 [parts, KV_HEADS, ROWS, DIM], divided by its own sum, and the log₂ of that to weights [parts,
    KV_HEADS, ROWS]. row_starts, starts: as in StepInputs, int32; gone, tables, width: as in Plan.
    """
    H: tl.constexpr = DIM // 2
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= count:
        return
    row = tl.load(items + item * COLUMNS)
    first = tl.load(items + item * COLUMNS + 1)
    begin = tl.load(items + item * COLUMNS + 2)
    end = tl.load(items + item * COLUMNS + 3)
    part = tl.load(items + item * COLUMNS + 4)
    token = tl.load(row_starts + row) + first
    left = tl.load(row_starts + row + 1) - token
    start = tl.load(starts + row) + first
    table = tables + row * tl.load(width) - tl.load(gone + row)

    m = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    valid = (m < ROWS // GROUP * GROUP) & (m // GROUP < left)
    mask = valid & (d < H)
    position = start + m // GROUP
    here = head * GROUP + m % GROUP
    at = query + (token + m // GROUP) * stride + here * DIM + d
    q0, q1 = tl.load(at, mask=mask, other=0.0).to(DOT), tl.load(at + H, mask=mask, other=0.0).to(DOT)

    sunk = tl.zeros([ROWS, 1], tl.float32)  # each query's score with the sink
    if KEY_BITS <= 8:
        centre = sink + head * DIM + d
        sunk = tl.sum(q0.to(tl.float32) * tl.load(centre, mask=d < H, other=0.0), axis=1, keep_dims=True)
        sunk += tl.sum(q1.to(tl.float32) * tl.load(centre + H, mask=d < H, other=0.0), axis=1, keep_dims=True)

    top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    sum0 = tl.zeros([ROWS, HALF], tl.float32)
    sum1 = tl.zeros([ROWS, HALF], tl.float32)
    dk = tl.arange(0, HALF)[:, None]
    for key in tl.range(begin, end, TILE):
        n = key + tl.arange(0, TILE)
        inside = n < end
        if WINDOWED:  # a block that no query sees may be gone
            inside = inside & (n > start - window)
        block = tl.load(table + n // BLOCK, mask=inside, other=0).to(tl.int64)
        tile, slot = block * KV_HEADS + head, n % BLOCK
        k0, k1 = halves(keys, tile[None, :], slot[None, :], dk, inside[None, :], DIM, HALF, BLOCK, KEY_BITS, DOT, ASM)
        scores = tl.dot(q1, k1, tl.dot(q0, k0, input_precision="tf32x3"), input_precision="tf32x3")
        if KEY_BITS <= 8:
            found = tl.load(scale_at(keys, tile, slot, DIM, BLOCK, KEY_BITS), mask=inside, other=0.0)
            found = found.to(tl.float32)[None, :]
            scores = scores * tl.abs(found) + tl.where(found < 0.0, sunk, 0.0)
        scores *= scale
        if CAPPED:
            scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
        seen = inside[None, :] & (n[None, :] <= position)
        if WINDOWED:
            seen = seen & (n[None, :] > position - window)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))

        highest = tl.maximum(top, tl.max(scores, axis=1, keep_dims=True))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - level)
        fade = tl.exp2(top - level)
        top = highest
        total = total * fade + tl.sum(p, axis=1, keep_dims=True)
        if VALUE_BITS <= 8:
            found = tl.load(scale_at(values, tile, slot, DIM, BLOCK, VALUE_BITS), mask=inside, other=0.0)
            p *= found.to(tl.float32)[None, :]
        v0, v1 = halves(
            values, tile[:, None], slot[:, None], d, inside[:, None], DIM, HALF, BLOCK, VALUE_BITS, DOT, ASM
        )
        p = p.to(DOT)
        sum0 = tl.dot(p, v0, sum0 * fade, input_precision="tf32x3")
        sum1 = tl.dot(p, v1, sum1 * fade, input_precision="tf32x3")

    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    sum0, sum1 = sum0 * share, sum1 * share
    if part < 0:
        to = out + ((token + m // GROUP) * (KV_HEADS * GROUP) + here) * DIM + d
        tl.store(to, sum0, mask=mask)
        tl.store(to + H, sum1, mask=mask)
    else:
        line = (part * KV_HEADS + head) * ROWS + m
        tl.store(parts + line * DIM + d, sum0, mask=mask)
        tl.store(parts + line * DIM + d + H, sum1, mask=mask)
        tl.store(weights + line, top + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["count"])
def merge(
    parts,
    weights,
    out,
    merges,
    row_starts,
    count,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile of queries whose context was split, for one key head: its parts, weighed by their sums."""
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= count:
        return
    row = tl.load(merges + item * 4)
    first = tl.load(merges + item * 4 + 1)
    part = tl.load(merges + item * 4 + 2)
    end = part + tl.load(merges + item * 4 + 3)
    token = tl.load(row_starts + row) + first
    left = tl.load(row_starts + row + 1) - token
    m = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDE)[None, :]
    valid = (m < ROWS // GROUP * GROUP) & (m // GROUP < left)
    mask = valid & (d < DIM)
    top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    for number in tl.range(part, end):
        line = (number * KV_HEADS + head) * ROWS + m
        weight = tl.load(weights + line, mask=valid, other=0.0)
        highest = tl.maximum(top, weight)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        fade, gain = tl.exp2(top - level), tl.exp2(weight - level)
        top = highest
        total = total * fade + gain
        sums = sums * fade + gain * tl.load(parts + line * DIM + d, mask=mask, other=0.0)
    to = out + ((token + m // GROUP) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP) * DIM + d
    tl.store(to, sums / total, mask=mask)


def bits(plane: Plane) -> int:
    return plane.tiles.element_size() * 8 if plane.codec is None else plane.codec.bits


def attention(
    query: Tensor,
    out: Tensor,
    storage: KVStorage,
    layer: int,
    plan: Plan,
    work: Work,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> list[Launch]:
    """One or two launches, for a part of a step's rows. query [tokens, heads, head_dim], a token's heads contiguous."""
    (_, heads, dim), kv_heads = query.shape, storage.k[layer].shape[1]
    group, rows = heads // kv_heads, work.rows
    wide = storage.k[layer].dtype.itemsize == 4
    # Of codes, ptxas spills a few registers here rather than give a program one more step of them (head sizes 64, 96).
    narrow = storage.fit is not None and dim % 128 != 0
    dot = dot_type(query.dtype, storage.k[layer].dtype)
    tile, stages = 64 if dim <= 128 and not wide and not narrow else 32, 3 if rows == 16 and not narrow else 2
    if dot == tl.float32 and dim > 128 and rows > 16:
        tile, stages = 16, 1  # more does not fit an A100's shared memory
    parts = query.new_empty((work.parts, kv_heads, rows, dim), dtype=torch.float32)
    weights = query.new_empty((work.parts, kv_heads, rows), dtype=torch.float32)
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "ROWS": rows}
    launches = [
        Launch(
            attend,
            (len(work.items), kv_heads),
            {
                "query": query,
                "keys": storage.k[layer],
                "values": storage.v[layer],
                "sink": query if storage.fit is None else storage.fit.sink(layer),
                "out": out,
                "parts": parts,
                "weights": weights,
                "items": work.items,
                "row_starts": plan.row_starts,
                "starts": plan.starts,
                "gone": plan.gone,
                "tables": plan.tables,
                "count": len(work.items),
                "width": plan.width,
                "stride": query.stride(0),
                "scale": scale,
                "window": window or 0,
                "softcap": softcap or 0.0,
                **shape,
                "HALF": power(16, dim // 2),
                "BLOCK": storage.block_size,
                "KEY_BITS": bits(storage.keys),
                "VALUE_BITS": bits(storage.values),
                "WINDOWED": window is not None,
                "CAPPED": softcap is not None,
                "TILE": tile,
                "COLUMNS": COLUMNS,
                "DOT": dot,
                "ASM": not INTERPRETED,
            },
            warps=4 if dim <= 128 or (rows == 16 and not wide) else 8,
            stages=stages,
        )
    ]
    if work.parts:
        merging = {"parts": parts, "weights": weights, "out": out, "merges": work.merges}
        launches.append(
            Launch(
                merge,
                (len(work.merges), kv_heads),
                {
                    **merging,
                    "row_starts": plan.row_starts,
                    "count": len(work.merges),
                    **shape,
                    "WIDE": power(16, dim),
                },
            )
        )
    return launches
