"""The prefix map: which block holds the keys and values of which prefix.

A prefix is a chain of full blocks. Each link is hashed from its parent's digest, its own tokens and the salt, so
different salts share nothing. The map is keyed by digest, but a digest is only a hint: a hit also compares the block's
tokens, its salt and its parent, so no collision can hand out foreign content.

      digest 0 = H(root, tokens 0, salt)     digest 1 = H(digest 0, tokens 1, salt)     …
         Node(block 7, parent None) ◀─────────── Node(block 3, parent ↑) ◀───────────── …

Where layers are in groups (`kvpool.groups`) a link has one block in each, and some of them may be gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvpool.blocks import NULL_BLOCK, PoolCorrupt

ROOT = b"\0" * 16
TOKEN_BYTES = array("I").itemsize


def chain_digest(parent: bytes, payload: bytes, salt: bytes) -> bytes:
    """Digest of one link, 16 bytes. Parent and payload have a fixed length within a pool, so the parts cannot mix."""
    return blake2b(parent + payload + salt, digest_size=16).digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit integers. OverflowError for an id that is none (a placeholder, say)."""
    return array("I", tokens).tobytes()


def unpack(payload: bytes) -> list[int]:
    return list(array("I", payload))


class Node:
    """One full block of a prefix. Lives on after its eviction (blocks all 0) while a child or a table refers to it."""

    __slots__ = ("blocks", "digest", "parent", "payload", "salt")

    def __init__(self, blocks: list[int], digest: bytes, parent: Node | None, payload: bytes, salt: bytes) -> None:
        self.blocks = blocks
        """By group; null where none is findable."""
        self.digest = digest
        self.parent = parent
        self.payload = payload
        self.salt = salt


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix. Good until the pool changes: adopt it at once or match again."""

    blocks: tuple[int, ...] = ()
    """Of the first group. Null ones first, where no later token sees them."""
    tokens: int = 0
    """(len(blocks) + len(stored)) * block_size"""
    free: int = 0
    """How many of the blocks lie in the free list now; adopting takes them out of it."""
    last: Node | None = field(default=None, repr=False, compare=False)
    """Prefix of `blocks`."""
    stored: tuple[bytes, ...] = ()
    """Heads of the blocks that follow, in the tier (`kvpool.tier`)."""
    more: tuple[tuple[int, ...], ...] = ()
    """`blocks` of the other groups."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return (self.blocks, *self.more)

    @property
    def shared(self) -> int:
        """Columns of blocks that adopting takes nothing for, rounded down."""
        return len(self.blocks) + -self.free // (1 + len(self.more))


def same_prefix(one: Node | None, other: Node | None) -> bool:
    """Whether two chains hold the same tokens under the same salt. O(length up to the first common node)."""
    while one is not other:
        if one is None or other is None or one.payload != other.payload or one.salt != other.salt:
            return False
        one, other = one.parent, other.parent
    return True


class PrefixMap:
    """Digest → Node of the blocks that hold it; in a group at most one block per prefix, at most one prefix per
    block."""

    __slots__ = ("_by_digest", "of")

    def __init__(self, num_blocks: int) -> None:
        self._by_digest: dict[bytes, Node] = {}
        self.of: list[Node | None] = [None] * num_blocks
        """By block: its node while it is findable. Read it freely; only this class writes it."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes, parent: Node | None, payload: bytes, salt: bytes) -> Node | None:
        """The node that holds exactly this link, verified, or None."""
        node = self._by_digest.get(digest)
        if node is None or node.payload != payload or node.salt != salt:
            return None
        if node.parent is not parent:
            if not same_prefix(node.parent, parent):
                return None
            # The parent was evicted and computed again. Link to the one that is findable, so that the walk above is
            # done once and the evicted chain can be collected.
            if parent is not None and any(parent.blocks):
                node.parent = parent
        return node

    def register(self, blocks: Sequence[int], digest: bytes, parent: Node | None, payload: bytes, salt: bytes) -> Node:
        """Make full, computed blocks findable, one a group; null ones are not. Where the prefix has a block already,
        that one stays. Where another prefix has the digest (a collision), a node is made but the blocks stay
        unfindable."""
        node = self.find(digest, parent, payload, salt)
        if node is None:
            node = Node([NULL_BLOCK] * len(blocks), digest, parent, payload, salt)
            if digest in self._by_digest:
                return node
        for group, block in enumerate(blocks):
            if block != NULL_BLOCK and node.blocks[group] == NULL_BLOCK:
                if self.of[block] is not None:
                    raise PoolCorrupt(f"block {block} is already registered, for another prefix")
                node.blocks[group] = block
                self.of[block] = self._by_digest[digest] = node
        return node

    def drop(self, block: int) -> None:
        """The block's content is about to change: nobody may find it any more."""
        node = self.of[block]
        if node is not None:
            node.blocks[node.blocks.index(block)] = NULL_BLOCK
            self.of[block] = None
            if not any(node.blocks):
                del self._by_digest[node.digest]

    def check(self, block_size: int) -> None:
        """Both directions of the map agree; every entry has full blocks and hashes to its key."""
        registered = 0
        for block, node in enumerate(self.of):
            if node is None:
                continue
            registered += 1
            if node.blocks.count(block) != 1 or self._by_digest.get(node.digest) is not node:
                raise PoolCorrupt(f"prefix map: block {block} and its entry disagree")
            if len(node.payload) != block_size * TOKEN_BYTES:
                raise PoolCorrupt(f"prefix map: block {block} is not full")
            parent = ROOT if node.parent is None else node.parent.digest
            if chain_digest(parent, node.payload, node.salt) != node.digest:
                raise PoolCorrupt(f"prefix map: block {block} is filed under a wrong digest")
        entries = [sum(map(bool, node.blocks)) for node in self._by_digest.values()]
        if registered != sum(entries) or not all(entries):
            raise PoolCorrupt(f"prefix map: {len(entries)} entries of {sum(entries)} blocks, {registered} registered")
