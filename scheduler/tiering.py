"""Tiering: what the pool drops is kept in its tier, and prefixes that go on there are read instead of computed.

    step    plan ─ adopt ─ restore ─ extend ─ save ─ execute ─ collect        save: what extend() took from the cache
    idle    chore, chore, …                                                   a few blocks that the tier has not yet
    end     close                                                             the rest of them

Blocks are read where that takes less time than computing them: the cost model knows the one, the first reads the other.
A tier that fails, be it for a full or a broken disk, is given up with one warning, and serving goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool.pool import Held, PrefixHit
from kvpool.tier import Bytes, Tier, head_of_node
from scheduler.cost import CostModel
from scheduler.policy import SchedulerState
from scheduler.sequence import Sequence as Stream

log = logging.getLogger(__name__)

CHORE_BLOCKS = 8
"""Saved at a time by an idle engine, which looks at its messages in between: some milliseconds."""
CLOSE_SECONDS = 2.0
"""For what is unsaved at the end: whoever ends this process waits for three."""
BUSY_SECONDS = 0.5
"""Reading for one sequence may hold up those that run for so long; what is left is computed."""
NEWEST = 0.3
"""Weight of the last reading in what reading is expected to take."""
HOPE = 0.002
"""By so much of the difference each step brings that back to the guess: a disk that was slow once is tried again."""


class BlockMemory(Protocol):
    """The pool's memory, as far as it is copied from here."""

    def gather(self, blocks: Sequence[int]) -> Bytes:
        """A copy of whole blocks, [n, block_bytes]."""
        ...

    def scatter(self, blocks: Sequence[int], content: Bytes) -> None:
        """The other way."""
        ...


class Tiering:
    """Owned by the engine."""

    def __init__(self, state: SchedulerState, memory: BlockMemory, cost: CostModel, clock: Callable[[], float]) -> None:
        """ValueError where the state's pool has no tier."""
        if state.pool.tier is None:
            raise ValueError("the pool has no tier")
        self._state, self._pool = state, state.pool
        self._tier: Tier = state.pool.tier
        self._memory = memory
        self._cost = cost
        self._clock = clock
        self._guess = self._seconds = self._tier.block_bytes / self._tier.bandwidth
        """Of reading a block."""
        self._tier.worth = self._worth

    @staticmethod
    def behind(
        state: SchedulerState, memory: BlockMemory | None, cost: CostModel, clock: Callable[[], float]
    ) -> Tiering | None:
        """None where the pool has no tier, or no memory."""
        return None if state.pool.tier is None or memory is None else Tiering(state, memory, cost, clock)

    @property
    def has_chores(self) -> bool:
        return self._pool.unsaved

    def restore(self, admitted: Mapping[Stream, PrefixHit]) -> None:
        """Read what is stored of these hits, whose other blocks have just been adopted. Where that is not what it was
        any more, the tables end before it; with a window they are empty then, for others would be needed before it."""
        for sequence, hit in admitted.items():
            if hit.stored:
                content = self._read(hit)
                if len(content) < len(hit.stored) and self._pool.windows[0] is not None:
                    self._pool.release(sequence.table)
                elif len(content):
                    self._extend(sequence, len(hit.blocks), content)

    def _read(self, hit: PrefixHit) -> Bytes:
        """The content of what is stored of it, block by block; fewer blocks where some are not what they were."""
        began = self._clock()
        try:
            content = self._tier.read(hit.stored)
        except OSError as error:
            self._give_up(error)
            return self._tier.read([])
        self._seconds += NEWEST * ((self._clock() - began) / len(hit.stored) - self._seconds)
        return content

    def _extend(self, sequence: Stream, start: int, content: Bytes) -> None:
        """Put blocks behind the `start` that the table has. The plan has counted them."""
        pool, table, size = self._pool, sequence.table, self._pool.block_size
        end = start + len(content)
        if not pool.extend(table, end * size, start * size):
            raise RuntimeError(f"the plan promised blocks that the pool does not have: {pool.usage()}")
        self.save()  # before anything is written to the blocks that extend() took
        self._memory.scatter(table.blocks[start:], content)
        pool.commit(table, sequence.tokens, end * size, sequence.salt)
        self._tier.counts.restores += 1
        self._tier.counts.restored += len(content)

    def save(self) -> None:
        """Keep what the pool is about to write over: after the last extend(), before anything is copied or computed."""
        if evicted := self._pool.take_evicted():
            self._put(evicted)
        self._seconds += HOPE * (self._guess - self._seconds)

    def chore(self) -> None:
        """Save a few blocks more of what only the pool has."""
        self._put(self._pool.take_unsaved(CHORE_BLOCKS))

    def close(self) -> None:
        """Save what is left, as long as there is time, and let go of the tier."""
        deadline = self._clock() + CLOSE_SECONDS
        while self.has_chores and self._clock() < deadline:
            self.chore()
        try:
            self._tier.close()
        except OSError as error:
            self._give_up(error)

    def _put(self, held: Held) -> None:
        fresh: list[tuple[int, bytes]] = []
        for block, node in held:
            head = head_of_node(node)
            if self._tier.holds(head):
                self._tier.touch([head])
            elif self._tier.total:
                fresh.append((block, head))
        if not fresh:
            return
        content = self._memory.gather([block for block, _ in fresh])
        try:
            for (_, head), row in zip(fresh, content, strict=True):
                self._tier.put(head, row)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._tier.fail()
        log.warning("the KV tier is given up, serving goes on without it: %s", error.strerror or error)

    def _worth(self, start: int, count: int) -> int:
        """See `Tier.worth`."""
        if self._state.running:
            count = min(count, max(1, int(BUSY_SECONDS / max(self._seconds, 1e-9))))
        computing = self._cost.prompt_seconds(start, count * self._pool.block_size)
        return count if self._seconds * count < computing else 0
