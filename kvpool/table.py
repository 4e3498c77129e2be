"""Block tables: which blocks hold a sequence's keys and values, in order.

tokens   0 … 15 │ 16 … 31 │ 32 … 47 │ 48 …         block_size 16
blocks      7   │    3    │   12    │   9          blocks[p // 16] holds position p, at offset p % 16
            └─ registered ┘
               (2 blocks)
"""

from __future__ import annotations

from kvpool.prefix import Node, unpack


class BlockTable:
    """One sequence's blocks. Only the pool changes it; others read `blocks`.

    `blocks` is one list object from the table's first block to its release, so a row may hold it; release leaves that
    list as it was and gives the table a new one, so a step that is still under way reads what it was given.
    """

    __slots__ = ("blocks", "freed", "node", "registered")

    def __init__(
        self, blocks: list[int] | None = None, registered: int = 0, node: Node | None = None, freed: int = 0
    ) -> None:
        self.blocks: list[int] = [] if blocks is None else blocks
        self.freed = freed
        """Leading blocks that lie behind the window of every layer: null blocks, which nobody reads any more."""
        self.registered = registered
        """Leading blocks that commit has seen full and computed. They are never written again, save after rewind()."""
        self.node = node
        """Prefix of those blocks; its chain has `registered` links."""

    def __len__(self) -> int:
        return len(self.blocks)

    def copy(self) -> BlockTable:
        """A second table over the same blocks. The caller counts the references."""
        return BlockTable(self.blocks.copy(), self.registered, self.node, self.freed)

    def rewind(self, registered: int) -> None:
        """Forget what commit saw from block `registered` on: those blocks are written again."""
        while self.registered > registered:
            assert self.node is not None
            self.node = self.node.parent
            self.registered -= 1

    def clear(self) -> None:
        self.blocks = []
        self.registered = self.freed = 0
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
