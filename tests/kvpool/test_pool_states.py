"""Random histories of the pool, against a plain model of it and against an oracle of what every slot holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool import prefix
from kvpool.pool import BlockTable, KVPool

Key = tuple[bytes, tuple[int, ...]]
GARBAGE = -7
AT_ONCE = st.booleans()

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class ModelPool:
    """The same rules written the slow way: lists, and whole prefixes as keys. It predicts every block number."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.refs = [0] * num_blocks
        self.free = list(range(1, num_blocks))
        self.findable: dict[Key, int] = {}
        self.copies: list[tuple[int, int]] = []

    def forget(self, block: int) -> None:
        self.findable = {key: b for key, b in self.findable.items() if b != block}

    def take(self) -> int:
        block = self.free.pop(0)
        self.forget(block)
        self.refs[block] = 1
        return block

    def match(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        found: list[int] = []
        for i in range((len(tokens) - 1) // self.size):
            block = self.findable.get((salt, tuple(tokens[: (i + 1) * self.size])))
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> list[int]:
        for block in blocks:
            self.refs[block] += 1
            if block in self.free:
                self.free.remove(block)
        return list(blocks)

    def written(self, blocks: list[int], num_tokens: int, start: int) -> range:
        return range(start // self.size, min(-(-num_tokens // self.size), len(blocks)))

    def needed(self, blocks: list[int], num_tokens: int, start: int) -> int:
        shared = sum(self.refs[blocks[i]] > 1 for i in self.written(blocks, num_tokens, start))
        return max(0, -(-num_tokens // self.size) - len(blocks)) + shared

    def extend(self, blocks: list[int], num_tokens: int, start: int) -> bool:
        if self.needed(blocks, num_tokens, start) > len(self.free):
            return False
        for i in self.written(blocks, num_tokens, start):
            if self.refs[blocks[i]] > 1:
                source, blocks[i] = blocks[i], self.take()
                self.refs[source] -= 1
                if start > i * self.size:
                    self.copies.append((source, blocks[i]))
            self.forget(blocks[i])
        while len(blocks) * self.size < num_tokens:
            blocks.append(self.take())
        return True

    def commit(self, blocks: list[int], seen: int, tokens: Sequence[int], salt: bytes) -> int:
        """Blocks from `seen` on are new to it. The first block of a prefix stays, and so does the first of a digest."""
        full = len(tokens) // self.size
        for i in range(seen, full):
            key = (salt, tuple(tokens[: (i + 1) * self.size]))
            if self.digest(key) not in map(self.digest, self.findable):
                self.findable[key] = blocks[i]
        return full

    def digest(self, key: Key) -> bytes:
        digest = prefix.ROOT
        for i in range(0, len(key[1]), self.size):
            digest = prefix.chain_digest(digest, prefix.pack(key[1][i : i + self.size]), key[0])
        return digest

    def release(self, blocks: list[int], kept: int = 0) -> None:
        for block in reversed(blocks[kept:]):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.insert(len(self.free) if block in self.findable.values() else 0, block)


@dataclass(eq=False)
class Seq:
    """What the scheduler knows of a sequence. `tokens[computed:]` is planned, not yet written."""

    table: BlockTable
    blocks: list[int]
    """The model's table."""
    seen: int
    """How many of those commit has seen."""
    tokens: list[int]
    computed: int
    salt: bytes
    hashes: list[bytes] = field(default_factory=list)

    @property
    def planned(self) -> bool:
        return self.computed < len(self.tokens)


class PoolMachine(RuleBasedStateMachine):
    """Steps as the engine makes them: plan (extend, preempt, fork, admit in any order), copy, write, commit."""

    @initialize(num_blocks=st.sampled_from([12, 16, 24, 8, 5, 2]), size=st.sampled_from([2, 1, 3]))
    def start(self, num_blocks: int, size: int) -> None:
        self.pool = KVPool(num_blocks, size)
        self.model = ModelPool(num_blocks, size)
        self.size = size
        self.seqs: list[Seq] = []
        self.prompts: list[tuple[bytes, list[int]]] = [(b"", [])]
        self.contents = [[GARBAGE] * size for _ in range(num_blocks)]

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        return [self.contents[blocks[p // self.size]][p % self.size] for p in range(count)]

    @rule(
        data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=5), hashed=st.booleans(), at_once=AT_ONCE
    )
    def add(self, data: st.DataObject, new: list[int], hashed: bool, at_once: bool) -> None:
        """A new sequence, often one that goes on from where another stands or stood."""
        salt, tokens = data.draw(st.sampled_from(self.prompts))
        tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *new]
        if data.draw(st.integers(0, 5)) == 0:
            salt = b"other"
        hashes = self.pool.hashes(tokens, salt) if hashed else None
        hit = self.pool.match(tokens, salt, hashes)
        assert hit.tokens == len(hit.blocks) * self.size < len(tokens)
        assert self.read(hit.blocks, hit.tokens) == tokens[: hit.tokens], "a hit on foreign content"
        assert list(hit.blocks) == self.model.match(tokens, salt)
        assert hit.free == sum(block in self.model.free for block in hit.blocks)
        table = self.pool.adopt(hit)
        seq = Seq(table, self.model.share(hit.blocks), len(hit.blocks), tokens[: hit.tokens], hit.tokens, salt)
        self.seqs.append(seq)
        if not self.write(seq, hit.tokens, tokens[hit.tokens :], at_once):
            self.drop(seq)

    def write(self, seq: Seq, start: int, new: list[int], at_once: bool) -> bool:
        """Plan to write `new` from `start` on; it runs with the next step, or at once. False where there is no room."""
        total = start + len(new)
        need, free = self.pool.blocks_needed(seq.table, total, start), self.pool.num_free
        assert need == self.model.needed(seq.blocks, total, start)
        done = self.pool.extend(seq.table, total, start)
        assert done == (need <= free) == self.model.extend(seq.blocks, total, start)
        assert self.pool.num_free == free - (need if done else 0)
        if done:
            seq.tokens = seq.tokens[:start] + new
            seq.computed = start
            seq.seen = min(seq.seen, start // self.size)
            del seq.hashes[start // self.size :]
            if at_once:
                self.run(fails=False)
        return done

    @precondition(lambda self: any(not seq.planned for seq in self.seqs))
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=3), at_once=AT_ONCE)
    def go_on(self, data: st.DataObject, new: list[int], at_once: bool) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.seqs if not seq.planned]))
        self.write(seq, seq.computed, new, at_once)

    @precondition(lambda self: any(not seq.planned for seq in self.seqs))
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=3), at_once=AT_ONCE)
    def diverge(self, data: st.DataObject, new: list[int], at_once: bool) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.seqs if not seq.planned]))
        self.write(seq, data.draw(st.integers(0, seq.computed - 1)), new, at_once)

    @precondition(lambda self: any(seq.planned for seq in self.seqs))
    @rule(data=st.data(), count=st.integers(1, 5))
    def guess(self, data: st.DataObject, count: int) -> None:
        """Room behind what is planned, for a draft, given back again."""
        seq = data.draw(st.sampled_from([seq for seq in self.seqs if seq.planned]))
        known = len(seq.tokens)
        done = self.pool.extend(seq.table, known + count, known)
        assert done == self.model.extend(seq.blocks, known + count, known)
        kept = -(-known // self.size)
        self.pool.trim(seq.table, known)
        self.model.release(seq.blocks, kept)
        del seq.blocks[kept:]

    @precondition(lambda self: any(not seq.planned for seq in self.seqs))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.seqs if not seq.planned]))
        blocks = self.model.share(seq.blocks)
        self.seqs.append(Seq(self.pool.fork(seq.table), blocks, seq.seen, seq.tokens.copy(), seq.computed, seq.salt))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.seqs)))

    def drop(self, seq: Seq) -> None:
        before, freed = self.pool.num_free, self.pool.freed_by(seq.table)
        held = seq.table.blocks
        kept = held.copy()
        self.pool.release(seq.table)
        assert self.pool.num_free == before + freed
        assert held == kept, "a row under way must keep its list"
        self.pool.release(seq.table)
        assert self.pool.num_free == before + freed, "a second release does nothing"
        self.model.release(seq.blocks)
        self.seqs.remove(seq)

    @rule(fails=st.sampled_from([False, False, False, True]))
    def step(self, fails: bool) -> None:
        self.run(fails)

    def run(self, fails: bool) -> None:
        """Copies first, then all writes, then commit; a failed step writes garbage and commits nothing."""
        copies = self.pool.take_copies()
        assert copies == self.model.copies
        assert self.pool.take_copies() == []
        self.model.copies = []
        for source, target in copies:
            self.contents[target] = self.contents[source].copy()
        for seq in [seq for seq in self.seqs if seq.planned]:
            for p in range(seq.computed, len(seq.tokens)):
                block = seq.table.blocks[p // self.size]
                assert self.model.refs[block] == 1, "a write into a shared block"
                self.contents[block][p % self.size] = GARBAGE if fails else seq.tokens[p]
            if fails:
                self.drop(seq)
            else:
                self.prompts.append((seq.salt, seq.tokens))
                seq.computed = len(seq.tokens)
                self.pool.commit(seq.table, seq.tokens, seq.computed, seq.salt)
                seq.seen = self.model.commit(seq.blocks, seq.seen, seq.tokens, seq.salt)
                self.pool.hashes(seq.tokens, seq.salt, seq.hashes)
                assert seq.hashes == self.pool.hashes(seq.tokens, seq.salt)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([seq.table for seq in self.seqs])
        for seq in self.seqs:
            assert seq.table.tokens() == seq.tokens[: seq.table.registered * self.size]
            if not seq.planned:
                assert self.read(seq.table.blocks, seq.computed) == seq.tokens
            assert seq.table.blocks == seq.blocks
        usage = self.pool.usage()
        assert usage.active == sum(refs > 0 for refs in self.model.refs)
        assert usage.free + usage.cached == self.pool.num_free == len(self.model.free)
        assert usage.cached == sum(block in self.model.free for block in self.model.findable.values())

    @invariant()
    def figures(self) -> None:
        if not hasattr(self, "pool"):
            return
        held: dict[int, int] = {}
        for seq in self.seqs:
            for i, block in enumerate(seq.table.blocks):
                count = min(self.size, max(0, seq.computed - i * self.size))
                held[block] = max(held.get(block, 0), count)
        total = sum(held.values())
        assert self.pool.tokens_held((seq.table, seq.computed) for seq in self.seqs) == total
        assert self.pool.waste(total) == pytest.approx(1 - total / (len(held) * self.size) if held else 0)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for seq in self.seqs:
            self.pool.release(seq.table)
        self.pool.check([])
        assert self.pool.usage().active == 0
        assert self.pool.num_free == self.pool.num_usable


class CollidingMachine(PoolMachine):
    """All digests are one of two: nearly every lookup meets a foreign entry, and none may be taken for a hit."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix, "chain_digest", weak_digest)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


def weak_digest(parent: bytes, payload: bytes, salt: bytes) -> bytes:
    return bytes([hashlib.blake2b(parent + payload + salt).digest()[0] % 2]) * 16


TestPool = PoolMachine.TestCase
TestPool.settings = SETTINGS
TestCollisions = CollidingMachine.TestCase
TestCollisions.settings = SETTINGS
