"""MemorySlots: a tier in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.tier import Bytes

MEMORY_BANDWIDTH = 2e9
"""Bytes a second, copied and hashed: what is believed until some were read."""
PART = 1 << 14
"""Words that are hashed at a time."""


class MemorySlots:
    """See `kvpool.tier.Slots`. Memory is taken as it is used.

    Content is hashed by Σ word · weight modulo 2^64, over words of 32 bits and random weights of 64: two that differ
    have the same sum at most once in 2^32 (multilinear hashing; Carter and Wegman, "Universal classes of hash
    functions", 1979). A device is fed from here at gigabytes a second, and a cryptographic hash does half of one.
    """

    persistent = False
    bandwidth = MEMORY_BANDWIDTH

    def __init__(self, count: int, block_bytes: int) -> None:
        """`block_bytes`: a multiple of 8. MemoryError."""
        self.count, self.block_bytes = count, block_bytes
        self._content = np.zeros((count, block_bytes), np.uint8)
        self._weights = np.random.default_rng().integers(1 << 64, size=block_bytes // 4, dtype=np.uint64)
        self._of: list[tuple[bytes, int]] = [(b"", 0)] * count
        """By slot: head, hash of the content."""

    def found(self) -> list[tuple[int, bytes]]:
        return []

    def put(self, slot: int, head: bytes, content: Bytes) -> None:
        self._content[slot] = content
        self._of[slot] = head, self._hash(content)

    def get(self, wanted: Sequence[tuple[int, bytes]], out: Bytes) -> list[bool]:
        np.take(self._content, [slot for slot, _ in wanted], axis=0, out=out)
        return [self._of[slot] == (head, self._hash(row)) for (slot, head), row in zip(wanted, out, strict=True)]

    def close(self, order: Sequence[int]) -> None:
        pass

    def _hash(self, content: Bytes) -> int:
        words, total = content.view(np.uint32), 0
        for begin in range(0, len(words), PART):  # so that the products stay in the cache
            part = slice(begin, begin + PART)
            total += int(np.add.reduce(words[part] * self._weights[part]))
        return total % (1 << 64)
