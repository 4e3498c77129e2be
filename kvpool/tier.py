"""Tier: a second place for the blocks of prefixes, behind the pool. Host memory, or a file that outlives the process.

    pool ── evicted, or nothing else to do ──▶ put ──▶ slot     a block's content, and the head that says whose it is
    pool ◀─── a prefix goes on where the pool has no more ── read ◀── slot

Which head lies in which slot is bookkeeping like the pool's; bytes are moved by the slots (`kvpool.slots`,
`kvpool.disk`). A head holds digest, parent, salt and tokens, and is compared whole, so a digest is as little as a hint
here as in the pool; and a content that does not sum up to what it did is no hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.prefix import ROOT, Node

Bytes = npt.NDArray[np.uint8]
DIGEST_BYTES = len(ROOT)
MARK_BYTES = 16


def head_bytes(block_size: int) -> int:
    """Length of a head: digest, parent's digest, salt's mark, tokens of 4 bytes each."""
    return 2 * DIGEST_BYTES + MARK_BYTES + 4 * block_size


def mark_of(salt: bytes) -> bytes:
    """What stands for a salt in heads: a salt has any length, and comes from somebody's key."""
    return blake2b(salt, digest_size=MARK_BYTES, person=b"octavo salt").digest()


def head_of(digest: bytes, parent: bytes, payload: bytes, mark: bytes) -> bytes:
    """Equal heads are equal prefixes under equal salts: the parent's digest stands for the chain before."""
    return b"".join((digest, parent, mark, payload))


def head_of_node(node: Node) -> bytes:
    return head_of(node.digest, ROOT if node.parent is None else node.parent.digest, node.payload, mark_of(node.salt))


class Slots(Protocol):
    """`count` places for the content of one block each."""

    count: int
    block_bytes: int
    persistent: bool
    """What is put there is found by the next process."""
    bandwidth: float
    """Bytes a second that reading may have; a guess, until some were read."""

    def found(self) -> list[tuple[int, bytes]]:
        """(slot, head) of what lay there at the start, least recently used first."""
        ...

    def put(self, slot: int, head: bytes, content: Bytes) -> None:
        """Store a block in the place of whatever was there; `content` [block_bytes] must not change any more. OSError,
        perhaps of an earlier put."""
        ...

    def get(self, wanted: Sequence[tuple[int, bytes]], out: Bytes) -> list[bool]:
        """Read slots into the rows of out [n, block_bytes]: whether each held that head, and content that sums up to
        what was put. OSError, perhaps of an earlier put."""
        ...

    def close(self, order: Sequence[int]) -> None:
        """Finish what is under way. `order`: used slots, least recently used first. OSError."""
        ...


@dataclass(slots=True)
class TierCounts:
    """They never fall."""

    restores: int = 0
    """Sequences that began with blocks from here."""
    restored: int = 0
    """Blocks that went back to the pool."""
    stored: int = 0
    """Blocks that were put here."""
    refused: int = 0
    """Blocks whose content was not what had been put."""


class Tier:
    """Head → slot, the least recently used replaced first. O(1) a block."""

    def __init__(self, slots: Slots) -> None:
        self.counts = TierCounts()
        self.total, self.block_bytes, self.persistent = slots.count, slots.block_bytes, slots.persistent
        self.bandwidth = slots.bandwidth
        self.worth: Callable[[int, int], int] = lambda start, count: count
        """How many of `count` blocks behind `start` tokens are better read than computed; its owner knows."""
        self._slots: Slots | None = slots
        self._by_digest: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        taken = [False] * slots.count
        for slot, head in slots.found():
            if (known := self._by_digest.pop(head[:DIGEST_BYTES], None)) is not None:
                taken[known[0]] = False
            self._by_digest[head[:DIGEST_BYTES]] = slot, head
            taken[slot] = True
        self._free = [slot for slot in range(slots.count - 1, -1, -1) if not taken[slot]]

    @property
    def used(self) -> int:
        """Slots that hold a block."""
        return len(self._by_digest)

    def holds(self, head: bytes) -> bool:
        found = self._by_digest.get(head[:DIGEST_BYTES])
        return found is not None and found[1] == head

    def touch(self, heads: Sequence[bytes]) -> None:
        """These, in the order of their chain, were used: its beginning is the last to be replaced."""
        for head in reversed(heads):
            if self.holds(head):
                self._by_digest.move_to_end(head[:DIGEST_BYTES])

    def put(self, head: bytes, content: Bytes) -> None:
        """Keep a block, content uint8 [block_bytes], which must not change any more. Nothing after fail(). OSError."""
        if self._slots is None:
            return
        digest = head[:DIGEST_BYTES]
        if digest in self._by_digest:
            slot = self._by_digest.pop(digest)[0]
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._by_digest.popitem(last=False)[1][0]
        self._by_digest[digest] = slot, head
        self.counts.stored += 1
        self._slots.put(slot, head, content)

    def read(self, heads: Sequence[bytes]) -> Bytes:
        """Content of these blocks, [n, block_bytes]: up to the first that is not here, or not what it was. OSError."""
        heads = list(takewhile(self.holds, heads))
        out = np.empty((len(heads), self.block_bytes), np.uint8)
        if self._slots is None or not heads:
            return out
        places = [(self._by_digest[head[:DIGEST_BYTES]][0], head) for head in heads]
        good = self._slots.get(places, out)
        for (slot, head), intact in zip(places, good, strict=True):
            if not intact:
                del self._by_digest[head[:DIGEST_BYTES]]
                self._free.append(slot)
                self.counts.refused += 1
        count = good.index(False) if False in good else len(good)
        self.touch(heads[:count])
        return out[:count]

    def fail(self) -> None:
        """Its slots are of no use any more: from now on it is empty and stays so."""
        self._slots = None
        self._by_digest.clear()
        self._free.clear()
        self.total = 0

    def close(self) -> None:
        """OSError."""
        if self._slots is not None:
            self._slots.close([slot for slot, _ in self._by_digest.values()])

    def check(self) -> None:
        """Every slot is free or holds one block; AssertionError."""
        used = [slot for slot, _ in self._by_digest.values()]
        assert sorted(used + self._free) == list(range(self.total)), "a slot is lost or used twice"
        assert all(head[:DIGEST_BYTES] == digest for digest, (_, head) in self._by_digest.items()), "a wrong digest"
