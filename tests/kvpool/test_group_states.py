"""Random histories of a pool of several groups, against an oracle of what every slot of every page holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.groups import Windows
from kvpool.lookup import unseen
from kvpool.pool import BlockTable, KVPool, PrefixHit

Cell = tuple[int, int, int] | None
"""Group, position, token."""
CHUNK = 5


@dataclass(eq=False)
class Seq:
    table: BlockTable
    tokens: list[int]
    """Computed, all of them."""
    salt: bytes


class GroupsMachine(RuleBasedStateMachine):
    """Steps as the engine makes them: extend, copy, write, commit, slide."""

    @initialize(
        num_blocks=st.sampled_from([60, 30, 16, 100]),
        size=st.sampled_from([2, 1, 3]),
        windows=st.sampled_from([(None, 4), (None, 4, 4), (3, 7), (None, 2, 9), (None, None, 5), (2,)]),
    )
    def start(self, num_blocks: int, size: int, windows: Windows) -> None:
        self.pool = KVPool(num_blocks, size, windows=windows)
        self.size, self.windows = size, windows
        self.seqs: list[Seq] = []
        self.prompts: list[tuple[bytes, list[int]]] = [(b"", [])]
        self.memory: list[list[Cell]] = [[None] * size for _ in range(num_blocks)]

    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=CHUNK))
    def add(self, data: st.DataObject, new: list[int]) -> None:
        """A new sequence, often one that goes on from where another stands or stood."""
        salt, tokens = data.draw(st.sampled_from(self.prompts))
        tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *new]
        if data.draw(st.integers(0, 5)) == 0:
            salt = b"other"
        hit = self.pool.match(tokens, salt)
        assert hit.tokens == len(hit.blocks) * self.size < len(tokens)
        assert hit.tokens == self.longest(tokens, salt) * self.size
        if hit.tokens:
            self.reads(hit.groups, tokens, hit.tokens, hit.tokens)
        assert hit.free == sum(block and not self.pool._refs[block] for blocks in hit.groups for block in blocks)
        free = self.pool.num_free
        seq = Seq(self.pool.adopt(hit), tokens[: hit.tokens], salt)
        assert self.pool.num_free == free - hit.free
        self.seqs.append(seq)
        for begin in range(hit.tokens, len(tokens), CHUNK):
            if not self.write(seq, begin, tokens[begin : begin + CHUNK]):
                self.drop(seq)
                break

    def longest(self, tokens: list[int], salt: bytes) -> int:
        """Columns of the longest hit, from what is findable, group by group."""
        known = set()
        for node in self.pool._map._by_digest.values():
            table = BlockTable(node=node)
            if node.salt == salt:
                known |= {(group, tuple(table.tokens())) for group, block in enumerate(node.blocks) if block}
        for count in range((len(tokens) - 1) // self.size, 0, -1):
            if all(
                (group, tuple(tokens[: (column + 1) * self.size])) in known
                for group, window in enumerate(self.windows)
                for column in range(unseen(count * self.size, self.size, window), count)
            ):
                return count
        return 0

    def reads(self, groups: Sequence[Sequence[int]], tokens: list[int], position: int, end: int) -> None:
        """What the token at `position` reads of the positions before `end`, in every group."""
        for group, (window, blocks) in enumerate(zip(self.windows, groups, strict=True)):
            for p in range(0 if window is None else max(0, position - window + 1), end):
                assert blocks[p // self.size], "a freed page is read"
                assert self.memory[blocks[p // self.size]][p % self.size] == (group, p, tokens[p])

    def write(self, seq: Seq, start: int, new: list[int]) -> bool:
        """A step of one row. False where there is no room, and then nothing changed."""
        pool, total = self.pool, start + len(new)
        need, free = pool.blocks_needed(seq.table, total, start), pool.num_free
        before = [blocks.copy() for blocks in seq.table.groups]
        done = pool.extend(seq.table, total, start)
        assert done == (need <= free)
        assert pool.num_free == free - need * done
        if not done:
            assert seq.table.groups == before
            return False
        for source, target in pool.take_copies():
            self.memory[target] = self.memory[source].copy()
        self.reads(seq.table.groups, seq.tokens, start, start)
        for group, blocks in enumerate(seq.table.groups):
            for p in range(start, total):
                assert pool._refs[blocks[p // self.size]] == 1, "a write into a shared page"
                self.memory[blocks[p // self.size]][p % self.size] = group, p, new[p - start]
        seq.tokens = seq.tokens[:start] + new
        self.prompts.append((seq.salt, seq.tokens))
        pool.commit(seq.table, seq.tokens, total, seq.salt)
        pool.slide(seq.table, total)
        held = sum(len(blocks) - freed for blocks, freed in zip(seq.table.groups, seq.table.freed, strict=True))
        assert held <= pool.paging.pages(total), "behind a window nothing is kept"
        return True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=CHUNK))
    def go_on(self, data: st.DataObject, new: list[int]) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        self.write(seq, len(seq.tokens), new)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), again=st.booleans(), new=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def fork(self, data: st.DataObject, again: bool, new: list[int]) -> None:
        """It goes on behind what the other has, or computes the last position again, as siblings do."""
        other = data.draw(st.sampled_from(self.seqs))
        seq = Seq(self.pool.fork(other.table), other.tokens, other.salt)
        self.seqs.append(seq)
        if again:
            new = [other.tokens[-1], *new]
        if not self.write(seq, len(other.tokens) - again, new):
            self.drop(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), count=st.integers(1, 4))
    def guess(self, data: st.DataObject, count: int) -> None:
        """Room for a draft, given back again."""
        seq = data.draw(st.sampled_from(self.seqs))
        known = len(seq.tokens)
        if self.pool.extend(seq.table, known + 1 + count, known):
            self.pool.trim(seq.table, known + 1)
            for source, target in self.pool.take_copies():
                self.memory[target] = self.memory[source].copy()

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """It ended, was aborted or preempted."""
        self.drop(data.draw(st.sampled_from(self.seqs)))

    def drop(self, seq: Seq) -> None:
        before, freed = self.pool.num_free, self.pool.freed_by(seq.table)
        self.pool.release(seq.table)
        assert self.pool.num_free == before + freed
        assert seq.table.groups == [[] for _ in self.windows]
        self.seqs.remove(seq)

    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        """What was matched before others took its pages is not adopted."""
        salt, tokens = data.draw(st.sampled_from(self.prompts))
        hit = self.pool.match([*tokens, 0], salt)
        taken = self.pool.new_table()
        count = self.pool.num_free // len(self.windows)
        assert self.pool.extend(taken, count * self.size, 0)
        if hit.free > self.pool.num_free:
            before = self.pool.usage()
            try:
                self.pool.adopt(hit)
            except ValueError:
                assert self.pool.usage() == before
            else:
                raise AssertionError("a stale hit was adopted")
        self.pool.release(taken)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([seq.table for seq in self.seqs])
        held: dict[int, int] = {}
        for seq in self.seqs:
            assert seq.table.tokens() == seq.tokens[: seq.table.registered * self.size]
            self.reads(seq.table.groups, seq.tokens, len(seq.tokens) - 1, len(seq.tokens))
            for blocks in seq.table.groups:
                for i, block in enumerate(blocks):
                    count = min(self.size, max(0, len(seq.tokens) - i * self.size))
                    held[block] = max(held.get(block, 0), count)
        held.pop(0, None)
        assert self.pool.usage().active == len(held)
        assert self.pool.tokens_held((seq.table, len(seq.tokens)) for seq in self.seqs) == sum(held.values())

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for seq in self.seqs:
            self.pool.release(seq.table)
        self.pool.check([])
        assert self.pool.usage().active == 0


def test_a_hit_of_nothing_is_an_empty_table_of_all_groups() -> None:
    pool = KVPool(20, 2, windows=(None, 4))
    table = pool.adopt(PrefixHit())
    assert pool.extend(table, 3, 0)
    assert table.groups == [[1, 3], [2, 4]]


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
