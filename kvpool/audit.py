"""What is true of a pool at any time, found out the slow way. `KVPool.check` compares it with what the pool counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.blocks import NULL_BLOCK, Blocks, PoolCorrupt
from kvpool.prefix import TOKEN_BYTES, PrefixMap, same_prefix
from kvpool.table import BlockTable


@dataclass(frozen=True, slots=True)
class Found:
    cached: int
    surplus: int
    """Σ max(0, references - 1)"""
    active: int


def audit(blocks: Blocks, found: PrefixMap, block_size: int, groups: int, tables: Iterable[BlockTable]) -> Found:
    """Raise PoolCorrupt where an invariant is broken. `tables`: every live table. O(pool).

    Σ references = Σ table lengths, block by block; no block is free and referenced; entries of the prefix map are full
    blocks under their right digest; a table has as many blocks in each group, those behind a window are null and no
    others, and its registered blocks hold the tokens its prefix says.
    """
    blocks.check()
    found.check(block_size)
    held = [0] * blocks.total
    for table in tables:
        own = [block for part, freed in zip(table.groups, table.freed, strict=True) for block in part[freed:]]
        gone = [block for part, freed in zip(table.groups, table.freed, strict=True) for block in part[:freed]]
        if len(set(own)) != len(own) or any(gone):
            raise PoolCorrupt(f"a table holds a block twice, or one behind the window: {table.groups}")
        if len(table.freed) != groups or len(set(map(len, table.groups))) != 1:
            raise PoolCorrupt(f"a table of {groups} groups is not even: {table.groups}")
        for block in own:
            if not NULL_BLOCK < block < blocks.total:
                raise PoolCorrupt(f"a table holds block {block} of {blocks.total}")
            held[block] += 1
        _check_prefix(table, found, block_size)
    for block, (refs, count) in enumerate(zip(blocks.refs, held, strict=True)):
        if refs != count:
            raise PoolCorrupt(f"block {block}: {refs} references, {count} live tables hold it")
    cached = sum(node is not None and refs == 0 for node, refs in zip(found.of, blocks.refs, strict=True))
    return Found(cached, sum(refs - 1 for refs in held if refs), len(held) - held.count(0))


def _check_prefix(table: BlockTable, found: PrefixMap, block_size: int) -> None:
    chain = table.chain()
    if len(chain) != table.registered or table.registered > len(table):
        raise PoolCorrupt(f"{table.registered} blocks registered, {len(chain)} in the chain, {len(table)} held")
    for group, blocks in enumerate(table.groups):
        for block, link in zip(blocks, chain, strict=False):
            node = found.of[block]
            if len(link.payload) != block_size * TOKEN_BYTES or (
                node and (node.blocks[group] != block or not same_prefix(node, link))
            ):
                raise PoolCorrupt(f"block {block} is registered for other tokens than its table's")
