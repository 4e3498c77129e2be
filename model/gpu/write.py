"""From what the QKV projection gives to what attention reads, in one kernel: norms of heads, rotary embedding, the fit
and rotation of keys that become codes, codes, and the places in the pool."""

import triton
import triton.language as tl
from torch import Tensor

from kvpool.storage import KVStorage
from model.gpu.attention import bits
from model.gpu.codes import rotated, store
from model.gpu.launch import Launch, dot_type
from model.gpu.plan import power
from model.gpu.rotation import signs
from model.inputs import StepInputs
from model.layers import RMSNorm

ROWS = 16


@triton.jit
def turned(
    x, weight, cos, sin, inverse, token, d, inside, DIM: tl.constexpr, ROTARY: tl.constexpr, NORMED: tl.constexpr
):
    """Places d of a head, normed and rotated: place i turns with i + ROTARY, and those from 2 · ROTARY stay."""
    value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        value *= inverse * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turns = inside & (d < 2 * ROTARY)
        partner = tl.where(d < ROTARY, d + ROTARY, d - ROTARY)
        other = tl.load(x + partner, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            other *= inverse * tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
        at = token * ROTARY + d % ROTARY
        c = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
        value = value * c + tl.where(d < ROTARY, -other, other) * s
    return value


@triton.jit(do_not_specialize=["tokens"])
def write(
    qkv,
    query,
    keys,
    values,
    weight,
    cos,
    sin,
    fit,
    signs,
    blocks,
    offsets,
    tokens,
    stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    NORMED: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some tokens of one head, of queries, keys and values one after the other.

    qkv [tokens, HEADS + 2 KV_HEADS, DIM] → query [tokens, HEADS, DIM], and the pool. weight [HEADS + KV_HEADS, DIM],
    cos, sin [tokens, ROTARY], fit [4, KV_HEADS, DIM], blocks and offsets int64 [tokens].
    """
    H: tl.constexpr = DIM // 2
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    known = token < tokens
    inside = known & (d < H)
    x = qkv + token * stride + head * DIM
    if head < HEADS + KV_HEADS:
        inverse = 1.0
        if NORMED:
            x0 = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
            x1 = tl.load(x + d + H, mask=inside, other=0.0).to(tl.float32)
            square = tl.sum(x0 * x0, axis=1, keep_dims=True) + tl.sum(x1 * x1, axis=1, keep_dims=True)
            inverse = tl.rsqrt(square / DIM + eps)
        w = weight + head * DIM
        y0 = turned(x, w, cos, sin, inverse, token, d, inside, DIM, ROTARY, NORMED)
        y1 = turned(x, w, cos, sin, inverse, token, d + H, inside, DIM, ROTARY, NORMED)
        if head < HEADS:
            if KEY_BITS <= 8:
                balance = fit + (2 * KV_HEADS + head // (HEADS // KV_HEADS)) * DIM + d
                y0 *= tl.load(balance, mask=d < H, other=0.0)
                y1 *= tl.load(balance + H, mask=d < H, other=0.0)
                y0, y1 = rotated(y0, y1, signs, DIM, HALF, DOT)
            to = query + (token * HEADS + head) * DIM + d
            tl.store(to, y0, mask=inside)
            tl.store(to + H, y1, mask=inside)
        else:
            kv = head - HEADS
            sinks = known
            if KEY_BITS <= 8:
                shift = fit + kv * DIM + d
                inverse_balance = shift + KV_HEADS * DIM
                y0 = (y0 - tl.load(shift, mask=d < H, other=0.0)) * tl.load(inverse_balance, mask=d < H, other=0.0)
                y1 = (y1 - tl.load(shift + H, mask=d < H, other=0.0)) * tl.load(
                    inverse_balance + H, mask=d < H, other=0.0
                )
                y0, y1 = rotated(y0, y1, signs, DIM, HALF, DOT)
                sink = fit + (3 * KV_HEADS + kv) * DIM + d
                left0 = y0 - tl.load(sink, mask=d < H, other=0.0)
                left1 = y1 - tl.load(sink + H, mask=d < H, other=0.0)
                whole = tl.sum(y0 * y0, axis=1, keep_dims=True) + tl.sum(y1 * y1, axis=1, keep_dims=True)
                left = tl.sum(left0 * left0, axis=1, keep_dims=True) + tl.sum(left1 * left1, axis=1, keep_dims=True)
                sinks = left < whole
                y0, y1 = tl.where(sinks, left0, y0), tl.where(sinks, left1, y1)
            tile = tl.load(blocks + token, mask=known, other=0) * KV_HEADS + kv
            slot = tl.load(offsets + token, mask=known, other=0)
            store(keys, y0, y1, sinks, tile, slot, d, known, DIM, HALF, BLOCK, KEY_BITS, True)
    else:
        y0 = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
        y1 = tl.load(x + d + H, mask=inside, other=0.0).to(tl.float32)
        if VALUE_BITS == 4:
            y0, y1 = rotated(y0, y1, signs, DIM, HALF, DOT)
        tile = tl.load(blocks + token, mask=known, other=0) * KV_HEADS + head - HEADS - KV_HEADS
        slot = tl.load(offsets + token, mask=known, other=0)
        store(values, y0, y1, known, tile, slot, d, known, DIM, HALF, BLOCK, VALUE_BITS, False)


def writing(
    qkv: Tensor,
    query: Tensor,
    storage: KVStorage,
    layer: int,
    inputs: StepInputs,
    *,
    norm: RMSNorm | None,
    cos_sin: tuple[Tensor, Tensor] | None,
) -> Launch:
    """qkv [tokens, heads + 2 kv_heads, head_dim], a token's heads contiguous → query, contiguous, and the pool.

    `norm` of query and key heads, `cos_sin` each [tokens, 1, rotary_dim / 2]; None: there is none. Queries come out as
    `model.gpu.attention` wants them: rotated where keys are.
    """
    (tokens, _, dim), heads, kv_heads = qkv.shape, query.shape[1], storage.k[layer].shape[1]
    cos, sin = cos_sin or (qkv, qkv)
    dot = dot_type(query.dtype, storage.k[layer].dtype)
    half = power(16, dim // 2)
    padded = storage.fit is not None and half != dim // 2  # of such codes, four warps spill a few registers
    return Launch(
        write,
        (triton.cdiv(tokens, ROWS), heads + 2 * kv_heads),
        {
            "qkv": qkv,
            "query": query,
            "keys": storage.k[layer],
            "values": storage.v[layer],
            "weight": qkv if norm is None else norm.weight,
            "cos": cos,
            "sin": sin,
            "fit": qkv if storage.fit is None else storage.fit.data[layer],
            "signs": signs(dim, qkv.device, dot) if storage.fit is not None else qkv,
            "blocks": inputs.blocks,
            "offsets": inputs.offsets,
            "tokens": tokens,
            "stride": qkv.stride(0),
            "eps": 0.0 if norm is None else norm.eps,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "HALF": half,
            "ROTARY": 0 if cos_sin is None else cos.shape[-1],
            "BLOCK": storage.block_size,
            "KEY_BITS": bits(storage.keys),
            "VALUE_BITS": bits(storage.values),
            "NORMED": norm is not None,
            "DOT": dot,
            "ROWS": ROWS,
        },
        warps=4 if dim <= 128 and not padded else 8,
    )
