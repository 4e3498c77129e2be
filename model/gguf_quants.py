"""GGUF's block formats and how they become float32. Layouts as in ggml's ggml-common.h. No torch here.

Every row of a tensor is a run of blocks; a block is a few scales and the packed integers that they scale:

    Q4_1  │ d f16 │ m f16 │ 16 bytes: low nibbles are values 0-15, high nibbles 16-31 │   value = d·q + m
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type. `dequantise` maps uint8 [blocks, bytes] to float32 [blocks, elements]."""

    name: str
    elements: int
    bytes: int
    dequantise: Callable[[Bytes], Floats]

    @property
    def is_quantised(self) -> bool:
        return self.elements > 1


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] → [blocks, 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] → [blocks, 32], each 0 or 16: the top bits of five-bit values, bit i for value i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * _half(blocks, 0)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight six-bit scales and eight six-bit minima of a Q4_K or Q5_K block, float32 [blocks, 8, 1] each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3; the low nibbles of bytes 8-11 belong to scales 4-7, the high
    ones to minima 4-7, whose upper two bits are the upper two bits of bytes 0-7.
    """
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale & 0x3F, (rest & 0x0F) | ((scale >> 2) & 0x30)], axis=1)
    minima = np.concatenate([minimum & 0x3F, (rest >> 4) | ((minimum >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _pairs(packed: Bytes, width: int) -> Bytes:
    """[blocks, n] → [blocks, 2n / 32, 32]: per `width` bytes first the low nibbles, then the high ones."""
    groups = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2).reshape(len(packed), -1, 32)


def _scaled(blocks: Bytes, values: Bytes) -> Floats:
    """What Q4_K and Q5_K share: two half-precision super-scales, then the packed six-bit ones."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d, dmin = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    return ((d * scales) * values.astype(np.float32) - dmin * minima).reshape(len(blocks), 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _pairs(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Floats:
    top = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _scaled(blocks, _pairs(blocks[:, 48:], 32) | (top << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    count = len(blocks)
    top = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    values = _pairs(blocks[:, :128], 64) | (top.reshape(count, 8, 32) << 4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    centred = values.reshape(count, 16, 16).astype(np.float32) - 32
    return ((_half(blocks, 208) * scales)[:, :, None] * centred).reshape(count, 256)


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
