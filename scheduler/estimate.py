"""How much of the pool the running sequences will need at worst, by what is known today.

After lightllm (ChunkedPrefillQueue): sort the sequences by what they still have to generate, the longest first. When
number i ends, numbers 0 … i still live and each has grown by remaining_i; the others have gone. So

      peak = max over i of   remaining_i · (i + 1)  +  Σ_{j ≤ i} used_j

here in blocks: `used` counts whole blocks, and those that other tables hold too are counted once. Behind a window
blocks are given back as others are taken: what a sequence will hold there at most is used from the start.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from kvpool.groups import NO_LIMIT
from kvpool.pool import KVPool
from scheduler.sequence import Sequence

HISTORY = 256
QUANTILE = 0.8
FIRST_GUESS = 256
"""Generated tokens of a sequence, before any has ended."""
MIN_REMAINING = 32
"""A sequence that outlived the estimate goes on for at least this long."""


class OutputLengths:
    """Learned number of generated tokens. `max_tokens` alone says little: its default is the rest of the context."""

    __slots__ = ("_ended", "_quantile")

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=HISTORY)
        self._quantile = FIRST_GUESS

    def observe(self, generated: int) -> None:
        """A sequence ended by itself. O(HISTORY log HISTORY)."""
        self._ended.append(generated)
        # A handful of ends are the short ones: the long ones still run. The guess fades out.
        guesses = [FIRST_GUESS] * max(0, 8 - len(self._ended))
        ordered = sorted([*self._ended, *guesses])
        self._quantile = ordered[int(QUANTILE * (len(ordered) - 1))]

    def remaining(self, sequence: Sequence) -> int:
        """Tokens it will still generate. Each preemption says that this was too low, and doubles it."""
        most = sequence.limit - len(sequence.tokens)
        return min(most, max(self._quantile - sequence.generated, MIN_REMAINING) << min(sequence.preemptions, 20))


def needed(pool: KVPool, tokens: int, left: int, shared: int = 0) -> int:
    """Blocks of its own that a sequence of so many tokens takes, of which `shared` columns are others'; behind a window
    as many as it will hold with `left` tokens more."""
    columns, grown = pool.paging.columns(tokens) - shared, pool.paging.columns(tokens + left) - shared
    return sum([count * (columns if most == NO_LIMIT else min(grown, most)) for _, count, most in pool.kinds])


def holding(pool: KVPool, sequence: Sequence, left: int) -> tuple[int, int, int]:
    """Blocks of its own that a running sequence holds or still needs for the tokens that it has; how many of them it
    still needs; and all that it needs as `needed` says."""
    held = len(sequence.table.blocks)
    columns, grown = pool.paging.columns(len(sequence.tokens)), pool.paging.columns(len(sequence.tokens) + left)
    now = missing = all_in_all = 0
    for first, count, most in pool.kinds:
        lost = max(sequence.shared, sequence.table.freed[first])
        known = min(columns, lost + most)
        own = max(held, known) - lost
        now += count * own
        missing += count * max(0, known - held)
        all_in_all += count * (own if most == NO_LIMIT else max(own, min(grown - lost, most)))
    return now, missing, all_in_all


class Peak:
    """The predicted peak of a set of sequences; grows by one candidate at a time."""

    __slots__ = ("_base", "_capacity", "_entries", "_growing", "_lengths", "_pool", "_size")

    def __init__(self, pool: KVPool, running: Iterable[Sequence], lengths: OutputLengths, capacity: int) -> None:
        """`capacity`: blocks that the peak may reach."""
        self._lengths = lengths
        self._capacity = capacity
        self._size = pool.block_size
        self._pool = pool
        self._growing = pool.windows.count(None)
        self._entries: list[tuple[int, int, int]] = []
        """(- remaining tokens, used blocks, blocks that grow with them), the longest first."""
        used = pending = 0
        for sequence in running:
            left = lengths.remaining(sequence)
            now, missing, most = holding(pool, sequence, left)
            used += now
            pending += missing
            self._entries += self._entries_of(sequence, most, left)
        self._entries.sort()
        # What is held and not counted: shared blocks whose first owner has gone.
        self._base = max(0, pool.num_usable - pool.num_free + pending - used)

    def admit(self, sequence: Sequence, shared: int, owed: bool = False) -> bool:
        """Count a candidate in, if the peak stays within the capacity or it is `owed` a place (`scheduler.shares`).
        `shared`: columns of blocks it finds active."""
        left = self._lengths.remaining(sequence)
        entries = self._entries.copy()
        for entry in self._entries_of(sequence, needed(self._pool, len(sequence.tokens), left, shared), left):
            insort(entries, entry)
        if not owed and self._peak(entries) > self._capacity:
            return False
        self._entries = entries
        return True

    def blocks(self) -> int:
        return self._peak(self._entries)

    def _entries_of(self, sequence: Sequence, own: int, left: int) -> list[tuple[int, int, int]]:
        # An unborn sibling shares the prompt and copies one block of it.
        unborn = len(sequence.request.unborn)
        sibling = [(-left, needed(self._pool, 1, left), self._growing)] if unborn else []
        return [(-left, own, self._growing)] + sibling * unborn

    def _peak(self, entries: list[tuple[int, int, int]]) -> int:
        used = peak = growing = 0
        size = self._size
        for remaining, own, grows in entries:
            used += own
            growing += grows
            need = used - remaining * growing // size
            if need > peak:
                peak = need
        return self._base + peak
