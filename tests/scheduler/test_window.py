"""Layers that slide: a sequence gives their early blocks back, and nobody misses them. Where only some do, each group
of layers has blocks of its own, and those that see all keep theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool.slots import MemorySlots
from kvpool.tier import Tier
from scheduler.limits import Limits
from scheduler.messages import BeamSearch

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

SIZE, WINDOW = 4, 12
PROMPT = [*range(40), *range(40), 0]
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=10_000)


def test_a_long_sequence_holds_its_window(world: type[World]) -> None:
    it = world(blocks=64, limits=LIMITS, windows=(WINDOW,))
    it.add(range(30), max_tokens=200)
    most = 0
    while it.inbox or it.engine.has_work:
        stats = it.step().stats
        if stats.running and stats.computed_tokens == 30:
            most = max(most, stats.blocks_active)
            assert stats.tokens_active <= stats.blocks_active * SIZE
    assert most <= WINDOW // SIZE + 2
    it.verify()


def test_many_fit_where_few_did(world: type[World]) -> None:
    """Four sequences of 200 tokens in a pool of 64 blocks, side by side and without a preemption."""
    it = world(blocks=64, limits=LIMITS, windows=(WINDOW,))
    for number in range(4):
        it.add([number] * 4, max_tokens=200)
    most = 0
    for _ in range(400):
        stats = it.step().stats
        most = max(most, stats.running)
    it.run()
    it.verify()
    assert most == 4
    assert it.last is not None
    assert it.last.stats.preemptions == 0


def test_forks_at_every_place_of_a_block(world: type[World]) -> None:
    """A fork computes the prompt's last position again, at the very edge of the window."""
    for length in range(WINDOW, WINDOW + 2 * SIZE):
        it = world(blocks=64, limits=LIMITS, windows=(WINDOW,))
        it.add(range(length), max_tokens=20, n=3)
        it.run()
        it.verify()


def test_a_prefix_is_found_by_its_end(world: type[World]) -> None:
    """Its beginning was given back first and is evicted first; a hit needs the window alone."""
    it = world(blocks=24, limits=LIMITS, windows=(WINDOW,))
    it.add(PROMPT[:-1], max_tokens=3)
    it.run()
    it.add([39] * 17, max_tokens=3)
    it.run()
    hit = it.pool.match(PROMPT, b"")
    assert hit.tokens == 80
    assert hit.blocks[:17] == (0,) * 17
    assert all(hit.blocks[17:])
    assert it.pool.match(PROMPT[:12], b"").tokens == 0, "its own beginning is gone"
    request = it.add(PROMPT, max_tokens=9)
    it.run()
    it.verify()
    assert it.started[request] == 80


def test_a_prefix_whose_window_has_a_gap_is_none(world: type[World]) -> None:
    it = world(blocks=40, limits=LIMITS, windows=(WINDOW,))
    it.add(PROMPT[:-1], max_tokens=1)
    it.run()
    block = it.pool.match(PROMPT, b"").blocks[-2]
    it.pool._map.drop(block)
    it.pool._cached -= 1
    assert it.pool.match(PROMPT, b"").tokens == 72
    assert it.pool.match(PROMPT, b"other").tokens == 0


def evicted(world: type[World], slots: MemorySlots) -> World:
    """Of PROMPT the pool has nothing left, its tier everything."""
    it = world(blocks=24, limits=LIMITS, windows=(WINDOW,), tier=Tier(slots))
    for prompt in (PROMPT[:-1], *([number] * 70 for number in range(4))):
        it.add(prompt, max_tokens=3)
        it.run()
    return it


def test_the_tier_gives_the_window_back(world: type[World]) -> None:
    it = evicted(world, MemorySlots(200, SIZE * 8))
    hit = it.pool.match(PROMPT, b"")
    assert (hit.tokens, len(hit.stored)) == (80, 3)
    request = it.add(PROMPT, max_tokens=9)
    it.run()
    it.verify()
    assert it.started[request] == 80
    assert it.last is not None
    assert it.last.stats.tier_restored_tokens == 3 * SIZE


def test_a_window_of_which_a_part_is_damaged_is_computed(world: type[World]) -> None:
    """What is left of it would need blocks before it that were not asked for."""
    slots = MemorySlots(200, SIZE * 8)
    it = evicted(world, slots)
    head = it.pool.match(PROMPT, b"").stored[-1]
    slots._content[next(slot for slot, (of, _) in enumerate(slots._of) if of == head), 0] ^= 1
    request = it.add(PROMPT, max_tokens=9)
    it.run()
    it.verify()
    assert it.started[request] == 0
    assert it.last is not None
    assert it.last.stats.tier_refused_tokens == SIZE


def test_a_window_is_read_whole_or_not_at_all(world: type[World]) -> None:
    it = evicted(world, MemorySlots(200, SIZE * 8))
    assert it.pool.tier is not None
    it.pool.tier.worth = lambda start, count: count - 1
    assert it.pool.match(PROMPT, b"").tokens == 0


MIXED = (None, WINDOW, WINDOW)


def test_of_some_layers_a_window_is_held(world: type[World]) -> None:
    """At every length: all columns of the group that sees all, and of each other one a window's."""
    it = world(blocks=200, limits=LIMITS, windows=MIXED)
    it.add(range(30), max_tokens=300)
    while it.inbox or it.engine.has_work:
        stats = it.step().stats
        if stats.running and stats.computed_tokens == 30:
            (sequence,) = it.engine._state.running
            assert stats.blocks_active <= it.pool.paging.pages(len(sequence.tokens))
    assert it.pool.paging.pages(330) < 83 + 2 * 5
    it.verify()


def test_several_times_more_users_fit(world: type[World]) -> None:
    """Six sequences of 200 tokens: 50 columns of three groups each would be 900 blocks."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=10_000)
    it = world(blocks=6 * 50 + 6 * 2 * 5 + 10, limits=limits, windows=MIXED)
    for number in range(6):
        it.add([number] * 4, max_tokens=196)
    most = 0
    for _ in range(400):
        most = max(most, it.step().stats.running)
    it.run()
    it.verify()
    assert most == 6
    assert it.last is not None
    assert it.last.stats.preemptions == 0


def test_forks_and_preemption_of_several_groups(world: type[World]) -> None:
    for length in range(WINDOW, WINDOW + 2 * SIZE):
        it = world(blocks=60, limits=LIMITS, windows=MIXED)
        for salt in (b"", b"other"):
            it.add(range(length), max_tokens=60, n=3, salt=salt)
        it.run()
        it.verify()
        assert it.last is not None
        assert it.last.stats.preemptions > 0


def test_a_hit_needs_what_every_group_sees(world: type[World]) -> None:
    """The columns behind the window may be gone from the groups that slide, and only from those."""
    it = world(blocks=200, limits=LIMITS, windows=MIXED)
    it.add(PROMPT[:-1], max_tokens=3)
    it.run()
    hit = it.pool.match(PROMPT, b"")
    assert hit.tokens == 80
    assert all(hit.blocks)
    for blocks in hit.more:
        assert blocks[:17] == (0,) * 17
        assert all(blocks[17:])
    for group, column, tokens in ((2, 19, 76), (1, 18, 72), (0, 10, 40)):
        block = hit.groups[group][column]
        it.pool._map.drop(block)
        it.pool._cached -= 1
        assert it.pool.match(PROMPT, b"").tokens == tokens
    request = it.add(PROMPT, max_tokens=9)
    it.run()
    it.verify()
    assert it.started[request] == 40


def test_what_no_pool_of_this_size_holds_is_refused(world: type[World]) -> None:
    """A window and a chunk of each group that slides, and all of the one that does not."""
    it = world(blocks=60, limits=LIMITS, windows=MIXED)
    longest = it.capacity
    assert it.pool.paging.pages(longest, 16) <= 60 < it.pool.paging.pages(longest + 1, 16)
    fits, refused = it.add(range(longest - 1), max_tokens=5), it.add(range(longest), max_tokens=5)
    it.run()
    assert it.streams[refused, 0].error.startswith("prompt: needs 61 blocks of 4 tokens, the pool has 60")
    assert len(it.streams[fits, 0].tokens) == 1


@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_beams_part_behind_the_window(world: type[World], windows: tuple[int | None, ...]) -> None:
    """A search that was preempted begins with one of its beams, which has slid past where others part from it."""
    for steps in range(10, 60, 7):
        it = world(blocks=200, limits=LIMITS, windows=windows)
        search = BeamSearch(width=3, length_penalty=1.0, early_stopping=False)
        it.add(range(9), max_tokens=60, n=2, search=search)
        for _ in range(steps):
            it.step()
        it.engine._phases.preempt(it.engine._state.running[0], yields=False)
        it.run()
        it.verify()
