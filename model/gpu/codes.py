"""Keys and values in the pool as a GPU's kernels read and write them. The layout: kvpool/plane.py, kvpool/codes.py.

A vector is handled in two halves, for a byte of 4-bit codes holds values j and j + dim / 2: so nibbles are never put
in order, and a score is two products of half the width. HALF is a half rounded up to a power of two.
"""

import triton
import triton.language as tl

SPREAD = tl.constexpr(46.47)
LARGEST = tl.constexpr(65504.0)
SMALLEST = tl.constexpr(2.0**-24)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it leaves a float32 no place for a fraction

# Four bytes of codes become 4 low and 4 high bfloat16 values. A nibble without its sign selects a byte of eight, which
# is what prmt does: `h` are the high bytes of the levels, `l` the low ones. Nibbles come as low, high, low, high.
LOOK_UP = tl.constexpr(
    """
    {
    .reg .b32 ha, hb, la, lb, i, j, h0, h1, l0, l1, s0, s1, t0, t1, p0, p1, p2, p3;
    mov.b32 ha, 0x42414140;
    mov.b32 hb, 0x42424242;
    mov.b32 la, 0x30F890C0;
    mov.b32 lb, 0xFEC09668;
    and.b32 i, $4, 0x77777777;
    shr.u32 j, i, 16;
    prmt.b32 h0, ha, hb, i;
    prmt.b32 h1, ha, hb, j;
    prmt.b32 l0, la, lb, i;
    prmt.b32 l1, la, lb, j;
    prmt.b32 s0, $4, 0, 0x1404;
    prmt.b32 s1, $4, 0, 0x3424;
    shl.b32 t0, s0, 4;
    shl.b32 t1, s1, 4;
    prmt.b32 p0, l0, h0, 0x6240;
    prmt.b32 p1, l1, h1, 0x6240;
    prmt.b32 p2, l0, h0, 0x7351;
    prmt.b32 p3, l1, h1, 0x7351;
    lop3.b32 $0, t0, 0x80008000, p0, 0xEA;
    lop3.b32 $1, t1, 0x80008000, p1, 0xEA;
    lop3.b32 $2, s0, 0x80008000, p2, 0xEA;
    lop3.b32 $3, s1, 0x80008000, p3, 0xEA;
    }
    """
)


@triton.jit
def level(nibble):
    """The whole number that a 4-bit code stands for: `kvpool.codes.LEVELS`, with its sign."""
    index = nibble & 7
    size = tl.where(index == 0, 6.0, 18.0)
    size = tl.where(index >= 2, tl.where(index == 2, 31.0, 44.0), size)
    size = tl.where(index >= 4, tl.where(index == 4, 58.0, 75.0), size)
    size = tl.where(index >= 6, tl.where(index == 6, 96.0, 127.0), size)
    return tl.where(nibble >= 8, -size, size)


@triton.jit
def halves(
    plane,
    tile,
    slot,
    d,
    inside,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both halves of vectors, or of their codes without the scale, in the type DOT.

    tile int64 (block · kv_heads + head) and slot lie along one axis, d along the other. Where not `inside`, nothing is
    read; numbers there are 0, those of 4-bit codes any level.
    """
    H: tl.constexpr = DIM // 2
    SIZE: tl.constexpr = BLOCK * (DIM * BITS // 8 + 2) if BITS <= 8 else BLOCK * DIM
    mask = inside
    if HALF != H:
        mask = inside & (d < H)
    if BITS == 4:
        codes = tl.load(plane + tile * SIZE + slot * H + d, mask=mask, other=0)
        if ASM:
            low, high = tl.inline_asm_elementwise(
                LOOK_UP, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
            return low.to(DOT), high.to(DOT)
        else:
            return level(codes & 15).to(DOT), level(codes >> 4).to(DOT)
    else:
        at = plane + tile * SIZE + slot * DIM + d
        if BITS == 8:
            low = tl.load(at, mask=mask, other=0).to(tl.int8, bitcast=True)
            high = tl.load(at + H, mask=mask, other=0).to(tl.int8, bitcast=True)
            return low.to(DOT), high.to(DOT)
        else:
            return tl.load(at, mask=mask, other=0.0).to(DOT), tl.load(at + H, mask=mask, other=0.0).to(DOT)


@triton.jit
def scale_at(plane, tile, slot, DIM: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Where the scales of coded vectors lie, as pointers to float16."""
    CODES: tl.constexpr = DIM * BITS // 8
    start = plane + tile * (BLOCK * (CODES + 2)) + BLOCK * CODES
    return start.to(tl.pointer_type(tl.float16), bitcast=True) + slot


@triton.jit
def signed_dot(x, signs, sums, DOT: tl.constexpr):
    """sums + x · signs for x float32 and a matrix of 0, 1 and -1 of the type DOT, as exact as float32 is."""
    if tl.float32 == DOT:
        return tl.dot(x, signs, sums, input_precision="tf32x3")
    else:  # 24 bits in three times 8
        first = x.to(DOT)
        rest = x - first.to(tl.float32)
        second = rest.to(DOT)
        third = (rest - second.to(tl.float32)).to(DOT)
        return tl.dot(third, signs, tl.dot(second, signs, tl.dot(first, signs, sums)))


@triton.jit
def rotated(x0, x1, signs, DIM: tl.constexpr, HALF: tl.constexpr, DOT: tl.constexpr):
    """R x for the halves [n, HALF] float32 of rows x; signs: `model.gpu.rotation.signs`."""
    H: tl.constexpr = DIM // 2
    k, n = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    inside = (k < H) & (n < H)
    at = signs + n * DIM + k
    zeros = tl.zeros_like(x0)
    y0 = signed_dot(x0, tl.load(at, mask=inside, other=0.0), zeros, DOT)
    y1 = signed_dot(x1, tl.load(at + H, mask=inside, other=0.0), zeros, DOT)
    if DIM & (DIM - 1) == 0:  # the matrix has the quarters [[a, b], [a, -b]]
        y0, y1 = y0 + y1, y0 - y1
    else:
        y0 += y1
        y1 = signed_dot(x0, tl.load(at + H * DIM, mask=inside, other=0.0), zeros, DOT)
        y1 = signed_dot(x1, tl.load(at + H * DIM + H, mask=inside, other=0.0), y1, DOT)
    NORM: tl.constexpr = (DIM & -DIM) ** -0.5
    return y0 * NORM, y1 * NORM


@triton.jit
def rotated_half(x0, x1, half, signs, DIM: tl.constexpr, HALF: tl.constexpr, DOT: tl.constexpr, BACK: tl.constexpr):
    """One half, 0 or 1, of R x, or with BACK of Rᵀ x: as `rotated`, with half of its registers."""
    H: tl.constexpr = DIM // 2
    DOWN: tl.constexpr = DIM if BACK else 1
    RIGHT: tl.constexpr = 1 if BACK else DIM
    k, n = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    inside = (k < H) & (n < H)
    at = signs + k * DOWN + (n + half * H) * RIGHT
    y = tl.zeros_like(x0)
    if BACK and DIM & (DIM - 1) == 0:  # of the transposed quarters the lower ones are the upper ones, or their opposite
        y = signed_dot(x0 + tl.where(half == 0, x1, -x1), tl.load(at, mask=inside, other=0.0), y, DOT)
    else:
        y = signed_dot(x0, tl.load(at, mask=inside, other=0.0), y, DOT)
        y = signed_dot(x1, tl.load(at + H * DOWN, mask=inside, other=0.0), y, DOT)
    NORM: tl.constexpr = (DIM & -DIM) ** -0.5
    return y * NORM


@triton.jit
def store(
    plane,
    x0,
    x1,
    sinks,
    tile,
    slot,
    d,
    inside,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    UNBIASED: tl.constexpr,
):
    """Write vectors, float32 halves [n, HALF], rotated already where their codec rotates them; tile and slot [n, 1].

    UNBIASED: they are keys; where `sinks` [n, 1], what these have beside the sink.
    """
    H: tl.constexpr = DIM // 2
    SIZE: tl.constexpr = BLOCK * (DIM * BITS // 8 + 2) if BITS <= 8 else BLOCK * DIM
    real = d < H
    mask = inside & real
    if BITS > 8:
        at = plane + tile * SIZE + slot * DIM + d
        tl.store(at, x0, mask=mask)
        tl.store(at + H, x1, mask=mask)
    else:
        broken = tl.sum(x0 - x0, axis=1, keep_dims=True) + tl.sum(x1 - x1, axis=1, keep_dims=True)
        if BITS == 8:
            top = tl.maximum(tl.max(tl.abs(x0), axis=1, keep_dims=True), tl.max(tl.abs(x1), axis=1, keep_dims=True))
            scale = (tl.minimum(tl.div_rn(top, 127.0), LARGEST) + broken).to(tl.float16)
            at = plane + tile * SIZE + slot * DIM + d
            tl.store(at, eighth(x0, scale.to(tl.float32)), mask=mask)
            tl.store(at + H, eighth(x1, scale.to(tl.float32)), mask=mask)
        else:
            square = tl.sum(x0 * x0, axis=1, keep_dims=True) + tl.sum(x1 * x1, axis=1, keep_dims=True)
            ROOT: tl.constexpr = DIM**0.5
            spread = tl.div_rn(SPREAD * ROOT, tl.sqrt_rn(square))
            n0, n1 = nearest(x0 * spread), nearest(x1 * spread)
            v0, v1 = tl.where(real, level(n0), 0.0), tl.where(real, level(n1), 0.0)
            dot = tl.sum(x0 * v0, axis=1, keep_dims=True) + tl.sum(x1 * v1, axis=1, keep_dims=True)
            if UNBIASED:
                found = tl.div_rn(square, dot)
            else:
                found = tl.div_rn(
                    dot, tl.sum(v0 * v0, axis=1, keep_dims=True) + tl.sum(v1 * v1, axis=1, keep_dims=True)
                )
            scale = (tl.minimum(tl.where(square == 0.0, 0.0, found), LARGEST) + broken).to(tl.float16)
            tl.store(plane + tile * SIZE + slot * H + d, (n0 | (n1 << 4)).to(tl.uint8), mask=mask)
        if UNBIASED:
            size = scale.to(tl.float32)
            scale = tl.where(sinks, -tl.where(size < SMALLEST, SMALLEST, size), size).to(tl.float16)
        tl.store(scale_at(plane, tile, slot, DIM, BLOCK, BITS), scale, mask=inside)


@triton.jit
def eighth(x, scale):
    """x / scale, to nearest, ties to even, as the byte of a signed integer; 0 for what is not a number."""
    code = tl.minimum(tl.maximum(tl.div_rn(x, scale), -127.0), 127.0)
    code = (code + ROUND) - ROUND
    return tl.where(code == code, code, 0.0).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def nearest(x):
    """The 4-bit code whose level is nearest to x, int32."""
    size = tl.abs(x)
    index = (size > 12.0).to(tl.int32) + (size > 24.5).to(tl.int32) + (size > 37.5).to(tl.int32)
    index += (size > 51.0).to(tl.int32) + (size > 66.5).to(tl.int32) + (size > 85.5).to(tl.int32)
    index += (size > 111.5).to(tl.int32)
    return index | ((x < 0.0).to(tl.int32) << 3)
