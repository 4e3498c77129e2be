"""One uniform number per (seed, sequence, position), without state.

A generation that is resumed, preempted or batched with others draws the same numbers as one that ran alone, because
nothing is counted but what the sequence itself contains.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): output
n of the stream that starts at s is mix(s + (n + 1) * GOLDEN). Each (seed, index) has a start of its own, itself an
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _output(start: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output `number` (from 0) of each stream; wraps modulo 2**64."""
    return _mix(start + (number + np.uint64(1)) * _GOLDEN)


@lru_cache(maxsize=4096)
def _start(seed: int, index: int) -> int:
    """Two outputs deep, so that neighbouring seeds and indices share no stream: a hash of both. Kept, because every
    step of a sequence asks for it."""
    outer = _output(np.array([seed & _MASK], dtype=np.uint64), np.array([0], dtype=np.uint64))
    return int(_output(outer, np.array([index], dtype=np.uint64))[0])


def uniforms(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2**-53, one per row. Seeds of any size and sign; taken modulo 2**64."""
    start = np.array([_start(seed, index) for seed, index in zip(seeds, indices, strict=True)], dtype=np.uint64)
    bits = _output(start, np.array(positions, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
