"""Groups: layers that share pages, and how many pages a sequence takes.

A block is a page: block_size tokens of one group's layers. Where all layers are alike there is one group. Where only
some slide, groups are of equal size and have one window each, so any page serves any group, all come from one free
list, and a sliding group gives back what lies behind its window.

    layers      s s F s s F             page of group 0    F F        group 1    s s        group 2    s s
    tokens      0 … 15 │ 16 … 31 │ …    one table for each; behind the window there are null blocks
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Windows = tuple[int | None, ...]
"""Tokens that a token sees, itself included; None: all."""

NO_LIMIT = 1 << 60
MOST_GROUPS = 16
"""Tables that a step reads and a sequence grows: more cost more than the few percent of padding that they save."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Where each layer's keys and values lie."""

    windows: Windows
    """By group; those that see all come first."""
    size: int
    """Layers that a page has room for; the last group of a kind may have fewer."""
    of: tuple[int, ...]
    """By layer: its group."""
    slots: tuple[int, ...]
    """By layer: its place in the pages of the group."""

    @staticmethod
    def by(windows: Sequence[int | None]) -> LayerGroups:
        """Of the windows of all layers. Of the sizes that make at most MOST_GROUPS groups the one that pads least, and
        of those the largest: where that is not too many, the greatest common divisor of the kinds' counts."""
        kinds = sorted(set(windows), key=lambda window: window or 0)
        counts = [sum(window == kind for window in windows) for kind in kinds]
        size = min(range(1, len(windows) + 1), key=lambda size: _cost(counts, size))
        of, slots, first = [0] * len(windows), [0] * len(windows), 0
        shared: list[int | None] = []
        for kind, count in zip(kinds, counts, strict=True):
            for number, layer in enumerate(layer for layer, window in enumerate(windows) if window == kind):
                of[layer], slots[layer] = first + number // size, number % size
            shared += [kind] * -(-count // size)
            first = len(shared)
        return LayerGroups(tuple(shared), size, tuple(of), tuple(slots))


def _cost(counts: list[int], size: int) -> tuple[bool, int, int]:
    groups = sum(-(-count // size) for count in counts)
    return groups > MOST_GROUPS, groups * size, groups


@dataclass(frozen=True, slots=True)
class Paging:
    """What sequences take of a pool. Columns are the blocks of one group's table."""

    block_size: int
    windows: Windows = (None,)

    def columns(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def most(self, window: int | None, chunk: int = 1) -> int:
        """Columns that are not null at a time, however long a sequence is whose steps compute up to `chunk` tokens:
        the window's, wherever it begins in a block, and the chunk's; the window slides as blocks are filled."""
        return NO_LIMIT if window is None else self.columns(window) + 1 + self.columns(chunk - 1)

    def pages(self, tokens: int, chunk: int = 1) -> int:
        """Pages that a sequence of so many tokens takes, at most."""
        columns = self.columns(tokens)
        return sum([min(columns, self.most(window, chunk)) for window in self.windows])

    def longest(self, pages: int, chunk: int, most: int) -> int:
        """Tokens of the longest sequence that so many pages hold, whole columns of them, and at most `most`."""
        columns = range(1, self.columns(most) + 1)
        fit = bisect_right(columns, pages, key=lambda count: self.pages(count * self.block_size, chunk))
        return min(most, fit * self.block_size)

    @property
    def kinds(self) -> list[tuple[int, int, int]]:
        """Neighbouring groups of one window: the first of them, how many, and the columns that each has at most."""
        found: list[tuple[int, int, int]] = []
        for group, window in enumerate(self.windows):
            if group and window == self.windows[group - 1]:
                first, count, most = found.pop()
                found.append((first, count + 1, most))
            else:
                found.append((group, 1, self.most(window)))
        return found
