"""KVPool: what the scheduler sees of the paged pool. Pure bookkeeping over block numbers; no tensor, no request.

A block is in exactly one of three states:

      active   referenced by at least one table
      cached   in the free list, still findable by its prefix; reused last
      free     in the free list, its content of no use; reused first

Where layers are in groups (`kvpool.groups`) a block holds tokens of one group's layers. Every table then has as many
blocks of each; what a method says of a table's blocks, tokens and prefix holds of all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpool import prefix
from kvpool.audit import audit
from kvpool.blocks import NULL_BLOCK, Blocks, PoolCorrupt
from kvpool.groups import Paging, Windows
from kvpool.lookup import find_prefix, unseen
from kvpool.prefix import ROOT, Node, PrefixHit, PrefixMap, pack
from kvpool.table import BlockTable
from kvpool.tier import Tier

__all__ = ["BlockTable", "KVPool", "PoolCorrupt", "PoolUsage", "PrefixHit"]

Held = list[tuple[int, Node]]
"""Blocks, and the prefixes whose keys and values they hold."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Blocks by state, without the null block: total = free + cached + active."""

    total: int
    free: int
    """In the free list, holding nothing of use."""
    cached: int
    """In the free list, findable by prefix."""
    active: int
    """Referenced by at least one table."""


class KVPool:
    """Hands out blocks of `block_size` token slots, shares them by prefix and by fork, and takes them back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        windows: Windows = (None,),
        tier: Tier | None = None,
    ) -> None:
        """`num_blocks` includes the null block 0. `windows`: tokens that a token sees, itself included, by group.
        `tier`: where prefixes go on that the pool has no more; of one group only. ValueError where a number is too
        small."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        if tier is not None and len(windows) > 1:
            raise ValueError("a tier keeps blocks of all layers: it needs a pool of one group")
        self.block_size = block_size
        self.paging = Paging(block_size, windows)
        self.kinds = self.paging.kinds
        self.num_usable = num_blocks - 1
        """Blocks that can hold tokens."""
        self.prefix_caching = prefix_caching
        self._blocks = Blocks(num_blocks)
        self._map = PrefixMap(num_blocks)
        self._cached = 0
        self._surplus = 0
        """Σ max(0, references - 1): how often shared blocks are counted too often when tables are summed."""
        self._copies: list[tuple[int, int]] = []
        self.windows = windows
        self.num_groups = len(windows)
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self.slides = bool(self._sliding)
        self.tier = tier
        self._evicted: Held = []
        self._unsaved: dict[int, Node] = {}
        """Blocks that became findable since the last save, where the tier outlives the pool; some may be stale."""
        # The same lists under short names: extend() runs once per row and step.
        self._refs = self._blocks.refs
        self._nodes = self._map.of

    # ---- prefixes ----

    @property
    def num_free(self) -> int:
        """Length of the free list: blocks that can be had now, cached ones included. O(1)."""
        return self._blocks.free

    def hashes(self, tokens: Sequence[int], salt: bytes, previous: list[bytes] | None = None) -> list[bytes]:
        """Digests of the full blocks of `tokens`, 16 bytes each.

        `previous` is what an earlier call gave for a beginning of these tokens; it is extended in place and returned,
        so a growing sequence hashes each block once. Empty where prefix caching is off.
        """
        digests = [] if previous is None else previous
        if self.prefix_caching:
            size = self.block_size
            digest = digests[-1] if digests else ROOT
            for i in range(len(digests), len(tokens) // size):
                digest = prefix.chain_digest(digest, pack(tokens[i * size : (i + 1) * size]), salt)
                digests.append(digest)
        return digests

    def match(self, tokens: Sequence[int], salt: bytes, hashes: Sequence[bytes] | None = None) -> PrefixHit:
        """The longest cached prefix of `tokens`, and where it goes on in the tier; changes nothing.

        Whole blocks only, and at most (len(tokens) - 1) // block_size of them, so that at least one token is left to
        compute. Every block's tokens, salt and parent are compared. `hashes` (from `hashes()`) saves hashing again.
        """
        if not self.prefix_caching or not (self._map or (self.tier is not None and self.tier.used)):
            return PrefixHit()
        hit = find_prefix(
            lambda: self._links(tokens, salt, hashes), salt, self.block_size, self._map, self.tier, self.windows
        )
        refs = self._refs
        free = [block != NULL_BLOCK and refs[block] == 0 for blocks in hit.groups for block in blocks]
        return replace(hit, free=sum(free))

    def _links(
        self, tokens: Sequence[int], salt: bytes, hashes: Sequence[bytes] | None
    ) -> Iterator[tuple[bytes, bytes]]:
        size = self.block_size
        digest = ROOT
        for i in range((len(tokens) - 1) // size):
            payload = pack(tokens[i * size : (i + 1) * size])
            given = hashes[i] if hashes and i < len(hashes) else None
            digest = given or prefix.chain_digest(digest, payload, salt)
            yield digest, payload

    # ---- tables ----

    def new_table(self) -> BlockTable:
        return BlockTable([[] for _ in self.windows])

    def adopt(self, hit: PrefixHit) -> BlockTable:
        """A new table that begins with the hit's blocks; what is stored is still to be read. ValueError
        where the hit is stale, and nothing changed."""
        if not hit.blocks:
            return self.new_table()
        chain = BlockTable(node=hit.last).chain()
        for group, blocks in enumerate(hit.groups):
            found = [link.blocks[group] for link in chain]
            if [block and now for block, now in zip(blocks, found, strict=False)] != list(blocks):
                raise ValueError("stale prefix hit: the pool changed between match() and adopt()")
        freed = [blocks.count(NULL_BLOCK) for blocks in hit.groups]
        for blocks, first in zip(hit.groups, freed, strict=True):
            for block in blocks[first:]:
                if self._refs[block]:
                    self._refs[block] += 1
                    self._surplus += 1
                else:
                    self._blocks.revive(block)
                    self._cached -= 1
        return BlockTable(list(map(list, hit.groups)), len(hit.blocks), hit.last, freed)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; the first write to a shared block copies it. O(blocks), takes none."""
        for blocks, freed in zip(table.groups, table.freed, strict=True):
            for block in blocks[freed:]:
                self._refs[block] += 1
            self._surplus += len(blocks) - freed
        return table.copy()

    def blocks_needed(self, table: BlockTable, num_tokens: int, start: int) -> int:
        """How many blocks extend() with the same arguments would take from the free list."""
        wanted = -(-num_tokens // self.block_size)
        missing = max(0, wanted - len(table.blocks))
        return missing * self.num_groups + len(self._shared(table, num_tokens, start))

    def extend(self, table: BlockTable, num_tokens: int, start: int) -> bool:
        """Make room for `num_tokens` tokens, of which positions start … num_tokens - 1 are about to be written.

        Afterwards the table covers num_tokens, and every block in the written range belongs to it alone: shared ones
        are replaced (see take_copies), its own registered ones stop being findable. False where the free list is too
        short, and then nothing changed.
        """
        size = self.block_size
        blocks = table.blocks
        first = start // size
        # The usual decode step: one position in a block that is ours alone and was never registered.
        if start < num_tokens <= (first + 1) * size and first < len(blocks) and first >= table.registered:
            block = blocks[first]
            if self._refs[block] == 1 and self._nodes[block] is None and (not table.more or self._owns(table, first)):
                return True
        wanted = -(-num_tokens // size)
        shared = self._shared(table, num_tokens, start)
        groups = table.groups
        missing = max(0, wanted - len(blocks))
        if missing * len(groups) + len(shared) > self._blocks.free:
            return False
        for blocks, i in shared:
            source, target = blocks[i], self._take()
            self._refs[source] -= 1
            self._surplus -= 1
            blocks[i] = target
            if start > i * size:  # else the block is written from its first slot on: nothing in it is worth copying
                self._copies.append((source, target))
        if start < num_tokens:
            for blocks in groups:
                for i in range(first, min(wanted, len(blocks))):
                    self._map.drop(blocks[i])
            table.rewind(first)
        for _ in range(missing):
            for blocks in groups:
                blocks.append(self._take())
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy, in order, before the next step computes; each is given out once."""
        copies = self._copies
        self._copies = []
        return copies

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int, salt: bytes) -> None:
        """Make the full blocks among the first `num_computed` tokens findable under `salt`.

        Call it only once their keys and values are really computed, else a failed step would poison the cache. Where
        a prefix is registered already, the first block stays. Does work only when a block has filled. ValueError where
        the table began under another salt.
        """
        full = num_computed // self.block_size
        if full <= table.registered or not self.prefix_caching:
            return
        if full > len(table.blocks) or num_computed > len(tokens):
            raise ValueError(f"commit of {num_computed} tokens: {len(tokens)} known, {len(table.blocks)} blocks")
        size, first = self.block_size, table.registered
        node = table.node
        if node is not None and node.salt != salt:
            raise ValueError("commit under another salt than the table's prefix")
        columns = zip(*(blocks[first:full] for blocks in table.groups), strict=True)
        for i, blocks in enumerate(columns, first):
            payload = pack(tokens[i * size : (i + 1) * size])
            digest = prefix.chain_digest(ROOT if node is None else node.digest, payload, salt)
            table.node = node = self._map.register(blocks, digest, node, payload, salt)
            table.registered = i + 1
            if self.tier is not None and self.tier.persistent and node.blocks[0] == blocks[0] != NULL_BLOCK:
                self._unsaved[blocks[0]] = node

    def freed_by(self, table: BlockTable) -> int:
        """How many blocks release() would return to the free list. O(blocks)."""
        refs = self._refs
        return sum(refs[block] == 1 for blocks in table.groups for block in blocks)

    def release(self, table: BlockTable) -> None:
        """Give the table's blocks up; the table is empty afterwards. Content stays findable until its block is reused.

        In reverse, so that a tail is evicted before its head: a tail without its head cannot be hit. The last step
        that writes to these blocks must be finished, or enqueued before whatever writes to them next.
        """
        blocks = [block for column in zip(*table.groups, strict=True) for block in column]
        for block in reversed(blocks):
            if block != NULL_BLOCK:
                self._give_up(block)
        table.clear()

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give up the blocks behind the first `num_tokens` tokens; commit must not have seen them."""
        for _ in range(-(-num_tokens // self.block_size), len(table.blocks)):
            for blocks in table.groups:
                self._give_up(blocks.pop())

    def slide(self, table: BlockTable, num_computed: int) -> None:
        """Give up the blocks that neither the last computed token, which a fork computes again, nor a later one sees.
        Null blocks stand in their place."""
        for group, window in self._sliding:
            end = unseen(num_computed - 1, self.block_size, window)
            blocks = table.more[group - 1] if group else table.blocks
            for i in range(table.freed[group], end):
                self._give_up(blocks[i])
                blocks[i] = NULL_BLOCK
            table.freed[group] = max(table.freed[group], end)

    # ---- the tier ----

    def take_evicted(self) -> Held:
        """Blocks that are about to be written over, and the prefixes that they held; to be saved before the next step
        computes or copies. Each is given out once; nothing where there is no tier."""
        evicted = self._evicted
        self._evicted = []
        return evicted

    def take_unsaved(self, most: int) -> Held:
        """The newest findable blocks that no call gave out yet; empty where nothing is left, or the tier does not
        outlive the pool. Ends of a prefix come before its beginning, so that the tier drops them first."""
        found: Held = []
        while self._unsaved and len(found) < most:
            block, node = self._unsaved.popitem()
            if block in node.blocks:
                found.append((block, node))
        return found

    @property
    def unsaved(self) -> bool:
        """Whether take_unsaved() may have something."""
        return bool(self._unsaved)

    # ---- figures and checks ----

    def usage(self) -> PoolUsage:
        """O(1)."""
        listed = self._blocks.free
        return PoolUsage(self.num_usable, listed - self._cached, self._cached, self.num_usable - listed)

    def tokens_held(self, rows: Iterable[tuple[BlockTable, int]]) -> int:
        """Slots of active blocks that hold a computed token, shared blocks counted once. A token has one in each group
        that it is not behind the window of.

        `rows`: every live table with its number of computed tokens. O(rows), not O(blocks): the sum of the rows counts
        a shared block once per table; `_surplus` says how often that is too much if all shared blocks are full, and
        only blocks at or behind the end of a row can be both shared and not full.
        """
        size = self.block_size
        refs = self._refs
        total = -self._surplus * size
        partial: dict[int, list[int]] = {}
        several = self.num_groups > 1
        for table, computed in rows:
            total += computed * self.num_groups - (sum(table.freed) * size if self.slides else 0)
            if not self._surplus:  # nothing is shared
                continue
            for blocks in table.groups if several else (table.blocks,):
                for i in range(computed // size, len(blocks)):
                    if refs[blocks[i]] > 1:
                        partial.setdefault(blocks[i], []).append(max(0, computed - i * size))
        for block, counts in partial.items():
            # Tables that are not listed here hold the block full.
            not_full = len(counts)
            if refs[block] > not_full:
                total += not_full * size - sum(counts)
            else:
                total += (not_full - 1) * size - sum(counts) + max(counts)
        return total

    def waste(self, tokens_held: int) -> float:
        """Share of the slots of active blocks that hold no token, 0 … 1; 0 where nothing is active."""
        slots = (self.num_usable - self._blocks.free) * self.block_size
        return 1.0 - tokens_held / slots if slots else 0.0

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise PoolCorrupt where an invariant is broken. `tables`: every live table. O(pool).

        What `kvpool.audit` says; and free + cached + active = total.
        """
        found = audit(self._blocks, self._map, self.block_size, self.num_groups, tables)
        if (found.cached, found.surplus) != (self._cached, self._surplus):
            raise PoolCorrupt(
                f"counted {self._cached} cached, {self._surplus} surplus; found {found.cached}, {found.surplus}"
            )
        usage = self.usage()
        if usage.active != found.active or usage.free + usage.cached + usage.active != usage.total:
            raise PoolCorrupt(f"{usage} does not add up; {found.active} blocks are held")

    def _give_up(self, block: int) -> None:
        left = self._refs[block] - 1
        self._refs[block] = left
        if left:
            self._surplus -= 1
        elif self._nodes[block] is None:
            self._blocks.put_oldest(block)
        else:
            self._blocks.put_newest(block)
            self._cached += 1

    def _take(self) -> int:
        block = self._blocks.take()
        node = self._nodes[block]
        if node is not None:
            if self.tier is not None:
                self._evicted.append((block, node))
            self._map.drop(block)
            self._cached -= 1
        return block

    def _owns(self, table: BlockTable, column: int) -> bool:
        """Whether nobody else holds, or may find, the column's blocks behind the first group's."""
        refs, nodes = self._refs, self._nodes
        return all(refs[blocks[column]] == 1 and nodes[blocks[column]] is None for blocks in table.more)

    def _shared(self, table: BlockTable, num_tokens: int, start: int) -> list[tuple[list[int], int]]:
        """Lists and indices of the blocks in the written range that other tables hold too."""
        if start >= num_tokens:
            return []
        refs = self._refs
        end = min(-(-num_tokens // self.block_size), len(table.blocks))
        columns = range(start // self.block_size, end)
        return [(blocks, i) for blocks in table.groups for i in columns if refs[blocks[i]] > 1]
