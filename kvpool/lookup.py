"""The longest prefix of a prompt that need not be computed: block by block in the pool, then in the tier behind it.

block            0   1   2   3   4   5
pool             ●   ●   ●                  up to the first that is in neither
tier                         ○   ○
with a window    ·   ·   ·   ●   ●   ○      what no later token sees (·) need not be anywhere: null blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool.blocks import NULL_BLOCK
from kvpool.prefix import ROOT, Node, PrefixHit, PrefixMap
from kvpool.tier import Tier, head_of, mark_of

Links = Iterable[tuple[bytes, bytes]]
"""Digest and packed tokens of a prompt's full blocks, first block first."""


def find_prefix(
    links: Callable[[], Links], salt: bytes, size: int, found: PrefixMap, tier: Tier | None, window: int | None
) -> PrefixHit:
    """The hit, its `free` aside. With a window a block that is missing ends nothing: a beginning is a hit where those
    blocks are there that the token behind it sees."""
    nodes: list[Node] = []
    heads: list[bytes] = []
    """Of the same blocks, where they are in the tier and not looked for in the pool."""
    mark = mark_of(salt) if tier is not None else b""
    begun, stored = 0, None
    """Where the present run of blocks begins, and from which on it is in the tier."""
    count = kept = 0
    """The longest hit: its blocks, and those of them that come before the tier's."""
    node: Node | None = None
    for number, (digest, payload) in enumerate(links()):
        child, head = None, b""
        if stored is None:
            child = found.find(digest, node, payload, salt)
        if child is None:
            if tier is not None:
                head = head_of(digest, ROOT if node is None else node.digest, payload, mark)
            if tier is not None and tier.holds(head):
                stored = number if stored is None else stored
            elif window is None:
                break
            else:
                begun, stored = number + 1, None
            child = Node(NULL_BLOCK, digest, node, payload, salt)
        nodes.append(child)
        heads.append(head)
        node = child
        if window is None or begun <= unseen((number + 1) * size, size, window):
            count = number + 1
            kept = count if stored is None else stored
    first = unseen(count * size, size, window)
    kept = max(kept, first)
    wanted = heads[kept:count]
    if tier is not None and wanted:
        worth = tier.worth(kept * size, len(wanted))
        if worth < len(wanted) and window is not None:
            return find_prefix(links, salt, size, found, None, window)
        wanted = wanted[:worth]
    blocks = (NULL_BLOCK,) * first + tuple([link.block for link in nodes[first:kept]])
    return PrefixHit(blocks, (kept + len(wanted)) * size, 0, nodes[kept - 1] if kept else None, tuple(wanted))


def unseen(position: int, size: int, window: int | None) -> int:
    """How many leading blocks neither the token at `position` nor a later one sees."""
    return 0 if window is None else max(0, position - window + 1) // size
