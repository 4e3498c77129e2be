"""How much of the pool the running sequences will need at worst, by what is known today.

After lightllm (ChunkedPrefillQueue): sort the sequences by what they still have to generate, the longest first. When
number i ends, numbers 0 … i still live and each has grown by remaining_i; the others have gone. So

      peak = max over i of   remaining_i · (i + 1)  +  Σ_{j ≤ i} used_j

here in blocks: `used` counts whole blocks, and those that other tables hold too are counted once.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

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


class Peak:
    """The predicted peak of a set of sequences; grows by one candidate at a time."""

    __slots__ = ("_base", "_capacity", "_entries", "_lengths", "_most", "_size")

    def __init__(self, pool: KVPool, running: Iterable[Sequence], lengths: OutputLengths, capacity: int) -> None:
        """`capacity`: blocks that the peak may reach."""
        self._lengths = lengths
        self._capacity = capacity
        self._size = pool.block_size
        self._most = pool.most_held
        self._entries: list[tuple[int, int]] = []
        """(- remaining tokens, used blocks), the longest first."""
        used = pending = 0
        for sequence in running:
            held = len(sequence.table.blocks)
            lost = max(sequence.shared, sequence.table.freed)
            known = min(-(-len(sequence.tokens) // self._size), lost + self._most)
            own = max(held, known) - lost
            used += own
            pending += max(0, known - held)
            self._entries += self._entries_of(sequence, own)
        self._entries.sort()
        # What is held and not counted: shared blocks whose first owner has gone.
        self._base = max(0, pool.num_usable - pool.num_free + pending - used)

    def admit(self, sequence: Sequence, shared: int, owed: bool = False) -> bool:
        """Count a candidate in, if the peak stays within the capacity or it is `owed` a place (`scheduler.shares`).
        `shared`: blocks it finds active."""
        own = min(-(-len(sequence.tokens) // self._size) - shared, self._most)
        entries = self._entries.copy()
        for entry in self._entries_of(sequence, own):
            insort(entries, entry)
        if not owed and self._peak(entries) > self._capacity:
            return False
        self._entries = entries
        return True

    def blocks(self) -> int:
        return self._peak(self._entries)

    def _entries_of(self, sequence: Sequence, own: int) -> list[tuple[int, int]]:
        # Behind a window blocks are given back as others are taken.
        remaining = -min(self._lengths.remaining(sequence), max(0, self._most - own) * self._size)
        # An unborn sibling shares the prompt and copies one block of it.
        return [(remaining, own)] + [(remaining, 1)] * len(sequence.request.unborn)

    def _peak(self, entries: list[tuple[int, int]]) -> int:
        used = peak = 0
        size = self._size
        for alive, (remaining, own) in enumerate(entries, 1):
            used += own
            need = used - remaining * alive // size
            if need > peak:
                peak = need
        return self._base + peak
