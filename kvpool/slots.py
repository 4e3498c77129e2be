"""MemorySlots: a tier in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.tier import Bytes

MEMORY_BANDWIDTH = 4e9


class MemorySlots:
    """See `kvpool.tier.Slots`. Memory is taken as it is used.

    The sums are fast ones, of words: a device is fed from here at gigabytes a second, and what they have to notice is a
    fault of this program's own.
    """

    persistent = False
    bandwidth = MEMORY_BANDWIDTH

    def __init__(self, count: int, block_bytes: int) -> None:
        """`block_bytes`: a multiple of 8. MemoryError."""
        self.count, self.block_bytes = count, block_bytes
        self._content = np.zeros((count, block_bytes), np.uint8)
        self._of: list[tuple[bytes, tuple[int, int]]] = [(b"", (0, 0))] * count
        """By slot: head, sums."""

    def found(self) -> list[tuple[int, bytes]]:
        return []

    def put(self, slot: int, head: bytes, content: Bytes) -> None:
        self._content[slot] = content
        self._of[slot] = head, _sums(content)

    def get(self, wanted: Sequence[tuple[int, bytes]], out: Bytes) -> list[bool]:
        np.take(self._content, [slot for slot, _ in wanted], axis=0, out=out)
        return [self._of[slot] == (head, _sums(row)) for (slot, head), row in zip(wanted, out, strict=True)]

    def close(self, order: Sequence[int]) -> None:
        pass


def _sums(content: Bytes) -> tuple[int, int]:
    words = content.view(np.uint64)
    return int(np.add.reduce(words)), int(np.bitwise_xor.reduce(words))
