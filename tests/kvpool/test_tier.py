"""Random histories of a tier on disk and in memory: put, read, restart, kill, damage; against a plain model of it."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.disk import DiskLayout, DiskSlots
from kvpool.prefix import ROOT, chain_digest, pack
from kvpool.slots import MemorySlots
from kvpool.tier import Bytes, Tier, head_of, mark_of

SIZE, BYTES = 2, 40
LENGTH = 8
"""Of the one chain that all heads belong to, under two salts."""


def chain(salt: bytes) -> list[bytes]:
    heads, parent = [], ROOT
    for number in range(LENGTH):
        payload = pack([number, number + 1])
        digest = chain_digest(parent, payload, salt)
        heads.append(head_of(digest, parent, payload, mark_of(salt)))
        parent = digest
    return heads


CHAINS = [chain(b""), chain(b"other")]


class TierMachine(RuleBasedStateMachine):
    """In memory; what only a file can do is below."""

    @initialize(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        self.count = count
        self.tier = Tier(MemorySlots(count, BYTES))
        self.model: OrderedDict[bytes, Bytes] = OrderedDict()
        self.broken: set[bytes] = set()
        self.puts = 0

    @rule(salt=st.integers(0, 1), number=st.integers(0, LENGTH - 1))
    def put(self, salt: int, number: int) -> None:
        head = CHAINS[salt][number]
        self.puts += 1
        content = np.random.default_rng(self.puts).integers(0, 256, BYTES, np.uint8)
        self.tier.put(head, content)
        if head not in self.model and len(self.model) == self.count:
            self.forget(next(iter(self.model)))
        self.forget(head)
        self.model[head] = content

    @rule(salt=st.integers(0, 1), first=st.integers(0, LENGTH - 1), count=st.integers(1, LENGTH))
    def read(self, salt: int, first: int, count: int) -> None:
        heads = CHAINS[salt][first : first + count]
        here = heads[: next((n for n, head in enumerate(heads) if head not in self.model), len(heads))]
        good = here[: next((n for n, head in enumerate(here) if head in self.broken), len(here))]
        refused = self.tier.counts.refused
        found = self.tier.read(heads)
        assert len(found) == len(good)
        for row, head in zip(found, good, strict=True):
            assert np.array_equal(row, self.model[head]), "foreign content"
        assert self.tier.counts.refused - refused == len(self.broken & set(here))
        for head in self.broken & set(here):
            self.forget(head)
        for head in reversed(good):
            self.model.move_to_end(head)

    def forget(self, head: bytes) -> None:
        self.model.pop(head, None)
        self.broken.discard(head)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert self.tier.used == len(self.model) <= self.tier.total == self.count
        assert all(self.tier.holds(head) == (head in self.model) for heads in CHAINS for head in heads)


class DiskMachine(TierMachine):
    """And restarts, kills and damage."""

    @initialize(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        super().start(count)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "kv")
        one = DiskLayout(1 << 20, SIZE, BYTES, b"i" * 32)
        self.layout = DiskLayout(2 * 4096 + count * (one.entry_bytes + one.stride), SIZE, BYTES, b"i" * 32)
        self.open()
        assert self.path.stat().st_size == self.layout.end <= self.layout.size

    def open(self) -> None:
        self.slots = DiskSlots(str(self.path), self.layout)
        assert self.slots.emptied is None
        self.tier = Tier(self.slots)

    @rule()
    def restart(self) -> None:
        """The order survives."""
        self.tier.close()
        self.open()

    @rule()
    def kill(self) -> None:
        """Nothing is written at the end. What was refused before may be found again, and is refused again; the order is
        that of writing, so the model learns it."""
        self.slots._settle()
        self.close()
        self.open()
        held = [head for _, head in self.tier._by_digest.values()]
        assert set(self.model) <= set(held)
        for head in held:
            if head not in self.model:
                self.broken.add(head)
            self.model[head] = self.model.pop(head, np.zeros(0, np.uint8))

    @precondition(lambda self: self.model.keys() - self.broken)
    @rule(data=st.data(), place=st.integers(0, BYTES - 1))
    def damage(self, data: st.DataObject, place: int) -> None:
        """A byte of a content changes under the running process."""
        head = data.draw(st.sampled_from([head for head in self.model if head not in self.broken]))
        self.slots._settle()
        offset = self.layout.content(self.tier._by_digest[head[:16]][0]) + place
        fd = os.open(self.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 255]), offset)
        os.close(fd)
        self.broken.add(head)

    def close(self) -> None:
        self.slots._writer.shutdown()
        self.slots._readers.shutdown()
        os.close(self.slots._fd)

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            self.close()
            self.folder.cleanup()


SETTINGS = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMemory = TierMachine.TestCase
TestMemory.settings = SETTINGS
TestDisk = DiskMachine.TestCase
TestDisk.settings = SETTINGS


def test_a_head_tells_prefixes_and_salts_apart() -> None:
    tier = Tier(MemorySlots(4, BYTES))
    mine, others = CHAINS[0][0], CHAINS[1][0]
    tier.put(mine, np.zeros(BYTES, np.uint8))
    assert tier.holds(mine)
    assert not tier.holds(others)
    forged = mine[:16] + others[16:]
    assert not tier.holds(forged), "the digest alone is no hit"
    assert len(tier.read([forged])) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.__setitem__(7, content[7] ^ 1),
        lambda content: content.__setitem__([7, 15], content[[7, 15]] ^ 128),  # two top bits of 64-bit words
        lambda content: content.__setitem__(slice(0, 16), np.roll(content[:16], 8)),  # two words change places
    ],
)
def test_memory_that_changed_is_refused(change: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    slots = MemorySlots(2, BYTES)
    tier = Tier(slots)
    for head in CHAINS[0][:2]:
        tier.put(head, np.arange(BYTES, dtype=np.uint8))
    change(slots._content[tier._by_digest[CHAINS[0][1][:16]][0]])
    assert len(tier.read(CHAINS[0][:2])) == 1
    assert (tier.used, tier.counts.refused) == (1, 1)


def test_a_chain_loses_its_end_first() -> None:
    tier = Tier(MemorySlots(4, BYTES))
    for head in CHAINS[0][:4]:
        tier.put(head, np.zeros(BYTES, np.uint8))
    assert len(tier.read(CHAINS[0][:4])) == 4
    for head in CHAINS[1][:2]:
        tier.put(head, np.zeros(BYTES, np.uint8))
    assert [tier.holds(head) for head in CHAINS[0][:4]] == [True, True, False, False]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_failure_it_is_empty_and_stays_so(persistent: bool, tmp_path: Path) -> None:
    slots = DiskSlots(str(tmp_path / "kv"), DiskLayout(1 << 20, SIZE, BYTES, b"i" * 32)) if persistent else None
    tier = Tier(slots or MemorySlots(2, BYTES))
    tier.put(CHAINS[0][0], np.zeros(BYTES, np.uint8))
    tier.fail()
    tier.put(CHAINS[0][1], np.zeros(BYTES, np.uint8))
    assert (tier.used, tier.total) == (0, 0)
    assert len(tier.read(CHAINS[0][:1])) == 0
    tier.check()
    tier.close()
    if slots is not None:
        slots.close([])
