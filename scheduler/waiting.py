"""The waiting queue, sorted by place: priority, then the preempted before the fresh, then arrival."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from scheduler.sequence import Sequence

Place = tuple[int, bool, float, int, int]


class WaitingQueue:
    """Insertion and removal are O(log n) comparisons and one memmove; the head is the first element."""

    __slots__ = ("_places", "_sequences", "tokens")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._sequences: list[Sequence] = []
        self.tokens = 0
        """Σ tokens of the sequences in it."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, count: int) -> list[Sequence]:
        return list(islice(self._sequences, count))

    def add(self, sequence: Sequence) -> None:
        place = sequence.place
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._sequences.insert(at, sequence)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """ValueError where it is not in the queue. Its place must be the one it was added with."""
        at = bisect_left(self._places, sequence.place)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise ValueError(f"sequence {sequence.rank} does not wait")
        del self._places[at], self._sequences[at]
        self.tokens -= len(sequence.tokens)
