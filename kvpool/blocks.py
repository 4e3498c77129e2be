"""Blocks: reference counts and the free list, which is also the LRU list.

The list is doubly linked and intrusive: block numbers index two arrays, so any block leaves it in O(1). Block 0 is the
null block; nothing else may use it, so it doubles as the list's sentinel.

      0 ⇄ oldest ⇄ … ⇄ newest ⇄ 0        take() from the left; a block is in the list iff its count is 0
"""

from __future__ import annotations

NULL_BLOCK = 0
"""Padding points here. Never handed out, never read for its content."""


class PoolCorrupt(AssertionError):
    """An invariant of the pool does not hold: a bug, never a user's fault."""


class Blocks:
    """`total` blocks, the null block included. All others start free, in ascending order."""

    __slots__ = ("_next", "_prev", "free", "refs", "total")

    def __init__(self, total: int) -> None:
        """Raises ValueError where there would be no usable block."""
        if total < 2:
            raise ValueError(f"num_blocks must be at least 2 (the null block and one to use), not {total}")
        self.total = total
        self.refs = [0] * total
        """Number of live tables that hold the block. Read it freely; only the pool writes it."""
        self.free = total - 1
        """Length of the free list."""
        self._next: list[int] = [*range(1, total), NULL_BLOCK]
        self._prev: list[int] = [total - 1, *range(total - 1)]

    def take(self) -> int:
        """Remove and return the least recently freed block, with a count of 1. The list must not be empty."""
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise PoolCorrupt("take() from an empty free list")
        self._unlink(block)
        self.refs[block] = 1
        return block

    def revive(self, block: int) -> None:
        """Take one particular free block out of the list, with a count of 1."""
        self._unlink(block)
        self.refs[block] = 1

    def put_newest(self, block: int) -> None:
        """Free a block whose content may be wanted again: it is reused last."""
        self._link(self._prev[NULL_BLOCK], block, NULL_BLOCK)

    def put_oldest(self, block: int) -> None:
        """Free a block whose content nobody can find: it is reused first."""
        self._link(NULL_BLOCK, block, self._next[NULL_BLOCK])

    def order(self) -> list[int]:
        """The free list, next to be reused first. O(free); raises PoolCorrupt where the links are broken."""
        found: list[int] = []
        previous, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if self._prev[block] != previous or len(found) >= self.free:
                raise PoolCorrupt(f"free list: broken link at block {block}")
            found.append(block)
            previous, block = block, self._next[block]
        if self._prev[NULL_BLOCK] != previous:
            raise PoolCorrupt("free list: broken link at its end")
        return found

    def check(self) -> None:
        """The list is whole, has the length it says, and holds exactly the blocks nobody references."""
        listed = self.order()
        if len(listed) != self.free:
            raise PoolCorrupt(f"free list: {len(listed)} blocks linked, {self.free} counted")
        for block in listed:
            if self.refs[block] != 0:
                raise PoolCorrupt(f"block {block} is free and has {self.refs[block]} references")
        unreferenced = self.refs.count(0) - 1
        if self.refs[NULL_BLOCK] != 0 or unreferenced != self.free or min(self.refs) < 0:
            raise PoolCorrupt(f"{unreferenced} blocks without references, {self.free} in the free list")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.free -= 1

    def _link(self, before: int, block: int, after: int) -> None:
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self.free += 1
