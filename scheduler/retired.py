"""Retired: the tables of sequences that run no more, while a step in flight still writes to their blocks.

launch k ─────────────── its sequence ends ──────── step k has ended: its blocks are free
"""

from __future__ import annotations

from collections import deque

from kvpool.pool import BlockTable, KVPool
from scheduler.sequence import Sequence


class Retired:
    """The one place that gives up blocks that may be in flight. Steps are counted from 1."""

    __slots__ = ("_pool", "_tables", "landed")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._tables: deque[tuple[int, BlockTable, int]] = deque()
        self.landed = 0
        """The last step that has ended, with all before it."""

    @property
    def tables(self) -> list[tuple[BlockTable, int]]:
        """Those that are kept, and how many tokens of each are computed."""
        return [(table, computed) for _, table, computed in self._tables]

    def take(self, sequence: Sequence) -> None:
        """A sequence gives up its table, which is empty then: at once, or once its last step has ended."""
        if sequence.flown > self.landed:
            self._tables.append((sequence.flown, sequence.table, sequence.num_computed))
            sequence.table = self._pool.new_table()
        else:
            self._pool.release(sequence.table)

    def land(self, step: int) -> bool:
        """All steps up to this one have ended. Whether blocks came free."""
        self.landed = step
        kept = len(self._tables)
        while self._tables and self._tables[0][0] <= step:
            self._pool.release(self._tables.popleft()[1])
        return len(self._tables) < kept
