"""The longest prefix of a prompt that need not be computed: block by block in the pool, then in the tier behind it.

block            0   1   2   3   4   5
pool             ●   ●   ●                  up to the first that is in neither
tier                         ○   ○
with a window    ·   ·   ·   ●   ●   ○      what no later token sees (·) need not be anywhere: null blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool.blocks import NULL_BLOCK
from kvpool.groups import Windows
from kvpool.prefix import ROOT, Node, PrefixHit, PrefixMap
from kvpool.tier import Tier, head_of, mark_of

Links = Iterable[tuple[bytes, bytes]]
"""Digest and packed tokens of a prompt's full blocks, first block first."""


def find_prefix(
    links: Callable[[], Links], salt: bytes, size: int, found: PrefixMap, tier: Tier | None, windows: Windows
) -> PrefixHit:
    """The hit, its `free` aside. In a group with a window a block that is missing ends nothing: a beginning is a hit
    where every group has the blocks that the token behind it sees. `tier`: only where there is one group."""
    nodes: list[Node] = []
    heads: list[bytes] = []
    """Of the same blocks, where they are in the tier and not looked for in the pool."""
    mark = mark_of(salt) if tier is not None else b""
    stored: int | None = None
    """From which block on the present run of blocks is in the tier."""
    begun = [0] * len(windows)
    """By group: where the present run of blocks begins."""
    count = kept = 0
    """The longest hit: its blocks, and those of them that come before the tier's."""
    slides = windows != (None,)
    whole = windows.index(None) if None in windows else None
    """A group that sees all: nothing goes on where it has a gap."""
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
            elif whole is not None:
                break
            else:
                begun, stored = [number + 1] * len(windows), None
            child = Node([NULL_BLOCK] * len(windows), digest, node, payload, salt)
        elif slides:
            begun = [begin if block else number + 1 for begin, block in zip(begun, child.blocks, strict=True)]
        nodes.append(child)
        heads.append(head)
        node = child
        behind = (number + 1) * size
        if not slides or all(b <= unseen(behind, size, window) for b, window in zip(begun, windows, strict=True)):
            count = number + 1
            kept = count if stored is None else stored
        elif whole is not None and begun[whole]:
            break
    firsts = [unseen(count * size, size, window) for window in windows]
    kept = max(kept, firsts[0])
    wanted = heads[kept:count]
    if tier is not None and wanted:
        worth = tier.worth(kept * size, len(wanted))
        if worth < len(wanted) and slides:
            return find_prefix(links, salt, size, found, None, windows)
        wanted = wanted[:worth]
    blocks, *more = (
        (NULL_BLOCK,) * first + tuple([link.blocks[group] for link in nodes[first:kept]])
        for group, first in enumerate(firsts)
    )
    last = nodes[kept - 1] if kept else None
    return PrefixHit(blocks, (kept + len(wanted)) * size, 0, last, tuple(wanted), tuple(more))


def unseen(position: int, size: int, window: int | None) -> int:
    """How many leading blocks neither the token at `position` nor a later one sees."""
    return 0 if window is None else max(0, position - window + 1) // size
