"""Block tables: which blocks hold a sequence's keys and values, in order.

tokens   0 … 15 │ 16 … 31 │ 32 … 47 │ 48 …         block_size 16
blocks      7   │    3    │   12    │   9          blocks[p // 16] holds position p, at offset p % 16
            └─ registered ┘
               (2 blocks)

Where layers are in groups (`kvpool.groups`) there is such a row for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.prefix import Node, unpack


class BlockTable:
    """One sequence's blocks. Only the pool changes it; others read `blocks` and `more`.

    Each is one list object from the table's first block to its release, so a row may hold it; release leaves those
    lists as they were and gives the table new ones, so a step that is still under way reads what it was given.
    """

    __slots__ = ("blocks", "freed", "more", "node", "registered")

    def __init__(
        self,
        groups: list[list[int]] | None = None,
        registered: int = 0,
        node: Node | None = None,
        freed: Sequence[int] = (),
    ) -> None:
        """`groups`: blocks of each; the lists become the table's."""
        groups = [[]] if groups is None else groups
        self.blocks: list[int] = groups[0]
        """Of the first group."""
        self.more: Sequence[list[int]] = groups[1:]
        """Of the others, if there are any: lists of the same length."""
        self.freed: list[int] = list(freed) or [0] * len(groups)
        """By group: leading blocks that lie behind the window: null blocks, which nobody reads any more."""
        self.registered = registered
        """Leading blocks that commit has seen full and computed. They are never written again, save after rewind()."""
        self.node = node
        """Prefix of those blocks; its chain has `registered` links."""

    def __len__(self) -> int:
        """Columns: blocks of one group."""
        return len(self.blocks)

    @property
    def groups(self) -> list[list[int]]:
        return [self.blocks, *self.more]

    def copy(self) -> BlockTable:
        """A second table over the same blocks. The caller counts the references."""
        return BlockTable([blocks.copy() for blocks in self.groups], self.registered, self.node, self.freed)

    def rewind(self, registered: int) -> None:
        """Forget what commit saw from block `registered` on: those blocks are written again."""
        while self.registered > registered:
            assert self.node is not None
            self.node = self.node.parent
            self.registered -= 1

    def clear(self) -> None:
        self.blocks, self.more = [], [[] for _ in self.more]
        self.freed = [0] * len(self.freed)
        self.registered = 0
        self.node = None

    def chain(self) -> list[Node]:
        """The prefix of the registered blocks, first block first. O(registered)."""
        nodes: list[Node] = []
        node = self.node
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def tokens(self) -> list[int]:
        """The tokens of the registered blocks, for checks."""
        return [token for node in self.chain() for token in unpack(node.payload)]
