"""The tier behind a running engine: what comes back is what was computed, and nothing comes back that should not."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpool.disk import DiskLayout, DiskSlots
from kvpool.slots import MemorySlots
from kvpool.tier import Bytes, Tier
from scheduler.cost import CostModel
from scheduler.limits import Limits
from scheduler.messages import FinishReason
from tests.scheduler.test_engine_random import add

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

SIZE = 4
CELL = 8
PROMPT = [(7 * i) % 40 for i in range(41)]
OTHER = [(5 * i + 3) % 40 for i in range(61)]


def memory(count: int, size: int = SIZE) -> Tier:
    return Tier(MemorySlots(count, size * CELL))


def on_disk(path: Path, count: int = 100) -> Tier:
    return Tier(DiskSlots(str(path), DiskLayout(9000 + count * 5000, SIZE, SIZE * CELL, b"i" * 32)))


def cached(it: World, prompt: list[int], salt: bytes = b"") -> int:
    """Run a request to its end; its cached tokens."""
    request = it.add(prompt, max_tokens=3, salt=salt)
    it.run()
    it.verify()
    return it.started[request]


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("count", [0, 5, 200])
def test_random_steps(world: type[World], rng: random.Random, window: int | None, count: int) -> None:
    """As without one, in a pool so small that most of what is asked for again has been evicted."""
    limits = Limits(
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([7, 64]),
        max_model_len=120,
        rope_switch=rng.choice([None, 24]),
        watermark=0.0,
        num_speculative_tokens=3,
    )
    tier = memory(count) if count else None
    it = world(12 if window is None else 20, SIZE, True, limits, (window,), tier)
    stems = [[rng.randrange(40) for _ in range(30)] for _ in range(2)]
    for _ in range(400):
        busy = sum(stream.finish is FinishReason.RUNNING for stream in it.streams.values())
        if rng.random() < 0.4 and busy < 12:
            add(it, rng, stems)
        if rng.random() < 0.05 and it.submits:
            it.abort(rng.choice(list(it.submits)), rng.choice([None, 0, 1]))
        it.step()
        if tier is not None:
            tier.check()
    it.run()
    it.verify()
    assert it.last is not None
    stats = it.last.stats
    assert stats.preemptions > 0
    assert (stats.tier_restored_tokens > 0) == (count == 200) or count == 5
    assert stats.tier_bytes_used <= stats.tier_bytes_total == count * SIZE * CELL
    assert stats.tier_refused_tokens == 0


def test_what_was_evicted_comes_back(world: type[World]) -> None:
    it = world(blocks=16, tier=memory(100))
    assert cached(it, PROMPT) == 0
    assert cached(it, OTHER) == 0, "takes the whole pool"
    before = len(it.runner.batches)
    assert cached(it, PROMPT) == 40
    assert it.runner.batches[before][0] == (40, 1), "one token is left to compute"
    assert it.last is not None
    assert (it.last.stats.tier_restores, it.last.stats.tier_restored_tokens) == (1, 40)
    assert it.last.stats.tier_stored_tokens >= 40
    assert cached(it, OTHER, salt=b"other tenant") == 0
    assert cached(it, PROMPT, salt=b"other tenant") == 0
    assert cached(it, PROMPT) == 40


def test_what_is_there_is_not_stored_twice(world: type[World]) -> None:
    it = world(blocks=16, tier=memory(100))
    for _ in range(3):
        cached(it, PROMPT)
        cached(it, OTHER)
    assert it.last is not None
    distinct = (len(PROMPT) + 3) // SIZE + (len(OTHER) + 3) // SIZE
    assert it.last.stats.tier_stored_tokens <= distinct * SIZE


def test_a_prefix_that_is_partly_in_the_pool(world: type[World]) -> None:
    """The end of a conversation was evicted, its beginning was not."""
    it = world(blocks=14, tier=memory(100))
    cached(it, PROMPT)
    cached(it, [1, 2, 3] * 6)
    hit = it.pool.match(PROMPT, b"")
    assert 0 < len(hit.blocks) < 10
    assert len(hit.blocks) + len(hit.stored) == 10
    assert cached(it, PROMPT) == 40


def test_reading_that_takes_longer_than_computing_is_left(world: type[World]) -> None:
    tier = memory(100)
    tier.bandwidth = 1.0
    it = world(blocks=16, tier=tier)
    cached(it, PROMPT)
    cached(it, OTHER)
    assert tier.used > 0
    assert cached(it, PROMPT) == 0


def test_what_changed_is_computed(world: type[World]) -> None:
    """From the first block that is not what it was."""
    slots = MemorySlots(100, SIZE * CELL)
    it = world(blocks=16, tier=Tier(slots))
    cached(it, PROMPT)
    cached(it, OTHER)
    hit = it.pool.match(PROMPT, b"")
    slot = it.pool.tier._by_digest[hit.stored[3][:16]][0] if it.pool.tier else 0
    slots._content[slot, 0] ^= 1
    assert cached(it, PROMPT) == (len(hit.blocks) + 3) * SIZE
    assert it.last is not None
    assert it.last.stats.tier_refused_tokens == SIZE


def test_a_restart_finds_everything(world: type[World], tmp_path: Path) -> None:
    """Also what was never evicted: an idle engine saves it, and a closing one the rest."""
    it = world(blocks=40, tier=on_disk(tmp_path / "kv"))
    cached(it, PROMPT)
    tiering = it.engine.tiering
    assert tiering is not None
    assert tiering.has_chores
    tiering.chore()
    assert it.pool.tier is not None
    assert it.pool.tier.used == 8
    cached(it, OTHER)
    tiering.close()
    assert not tiering.has_chores

    it = world(blocks=40, tier=on_disk(tmp_path / "kv"))
    assert cached(it, PROMPT, salt=b"other tenant") == 0
    assert cached(it, PROMPT) == 40
    assert cached(it, [*OTHER, 1, 2]) == 60
    assert it.engine.tiering is not None
    it.engine.tiering.close()


def test_what_was_saved_once_is_no_chore(world: type[World], tmp_path: Path) -> None:
    it = world(blocks=40, tier=on_disk(tmp_path / "kv"))
    cached(it, PROMPT)
    tiering = it.engine.tiering
    assert tiering is not None
    while tiering.has_chores:
        tiering.chore()
    cached(it, PROMPT)
    tiering.close()
    assert it.pool.tier is not None
    assert it.pool.tier.counts.stored == it.pool.tier.used


class Broken(MemorySlots):
    """Fails from some time on."""

    works = True

    def put(self, slot: int, head: bytes, content: Bytes) -> None:
        if not self.works:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(slot, head, content)

    def get(self, wanted: Sequence[tuple[int, bytes]], out: Bytes) -> list[bool]:
        if not self.works:
            raise OSError(errno.EIO, "Input/output error")
        return super().get(wanted, out)


@pytest.mark.parametrize("reads", [True, False])
def test_a_tier_that_fails_is_given_up(world: type[World], caplog: pytest.LogCaptureFixture, reads: bool) -> None:
    slots = Broken(100, SIZE * CELL)
    it = world(blocks=16, tier=Tier(slots))
    cached(it, PROMPT)
    cached(it, OTHER)
    slots.works = False
    with caplog.at_level(logging.WARNING):
        assert cached(it, PROMPT if reads else [9] * 50) == 0
    assert len(caplog.records) == 1
    assert "the KV tier is given up" in caplog.text
    assert it.last is not None
    assert (it.last.stats.tier_bytes_total, it.last.stats.tier_bytes_used) == (0, 0)
    cached(it, OTHER)


def test_reading_holds_up_those_that_run_for_a_bounded_time(
    world: type[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "prompt_seconds", lambda self, start, count: 1e9)
    it = world(blocks=32, tier=memory(100))
    cached(it, PROMPT)
    cached(it, list(range(40)) * 3)
    it.add([1], max_tokens=9)
    it.step()
    assert it.engine.tiering is not None
    it.engine.tiering._seconds = 0.1
    assert len(it.pool.match(PROMPT, b"").stored) == 5
    it.run()
    assert len(it.pool.match(PROMPT, b"").stored) > 5
