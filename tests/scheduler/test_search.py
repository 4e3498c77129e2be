"""Searches in the engine: rows among others, one prefill, forks after every step; the same beams whatever happens."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.pool import KVPool
from scheduler import estimate
from scheduler.limits import Limits
from scheduler.messages import BeamSearch, FinishReason
from tests.scheduler.conftest import World
from tests.scheduler.searching import WORDS


def limits(tokens: int = 64, seqs: int = 16, switch: int | None = None) -> Limits:
    return Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=10_000, rope_switch=switch)


def beams(width: int, **fields: Any) -> BeamSearch:
    return BeamSearch(width=width, **fields)


def test_one_search() -> None:
    it = World()
    request = it.add(range(10), max_tokens=6, n=3, search=beams(4, length_penalty=0.0), stops=(2, 5))
    while it.engine.has_work or it.inbox:
        output = it.step()
        assert not output.ids or not it.engine.has_work, "nothing is sent before the end"
    it.run()
    it.verify()
    assert FinishReason.STOP in {it.streams[request, i].finish for i in range(3)}
    assert it.runner.batches[0] == [(0, 10)], "one prefill"
    for number, rows in enumerate(it.runner.batches[1:]):
        assert rows == [(10 + number, 1)] * 4


def test_a_single_beam_is_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    it = World()
    monkeypatch.setattr(KVPool, "fork", None)
    it.add(range(9), max_tokens=20, search=beams(1))
    it.run()
    it.verify()


def test_beams_share_what_they_have_in_common() -> None:
    """Eight beams behind a prompt of ten full blocks: each holds the blocks that it alone has written to."""
    it = World(blocks=200)
    it.add(range(40), max_tokens=9, search=beams(8), n=8)
    it.run()
    it.verify()
    it.add(range(40), max_tokens=9, search=beams(8), n=8)
    for _ in range(8):
        active = it.step().stats.blocks_active
    assert active <= 10 + 8 * 2


def test_nothing_to_generate() -> None:
    it = World()
    it.add(range(9), max_tokens=0, n=2, search=beams(3))
    it.run()
    it.verify()


@pytest.mark.parametrize("tokens", [3, 5, 9])
def test_a_step_too_small_for_all_beams(tokens: int) -> None:
    """Those that are through wait for the others."""
    it = World(limits=limits(tokens))
    it.add(range(9), max_tokens=6, search=beams(6), n=6, stops=(3,))
    it.add(range(50, 70), max_tokens=12)
    it.run()
    it.verify()


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_beams_are_found_again(caching: bool, hopeful: None) -> None:
    it = World(blocks=20, prefix_caching=caching)
    first = it.add(range(10), max_tokens=40)
    for _ in range(30):
        it.step()
    search = it.add(range(100, 110), max_tokens=12, n=4, search=beams(4))
    while not it.streams[first, 0].finish:
        it.step()
    assert it.last is not None
    assert it.last.stats.preemptions == 1
    assert not it.streams[search, 0].finish
    before = len(it.runner.batches)
    it.run()
    it.verify()
    after = it.runner.batches[before:]
    assert len(after[0]) == 1, "one beam computes what it knows"
    assert any(len(rows) == 4 for rows in after)
    assert all(start > 0 for rows in after[1:] for start, _ in rows), "the others go on from its blocks"


def test_short_rotary_factors_are_outgrown() -> None:
    it = World(limits=limits(switch=14))
    it.add(range(10), max_tokens=9, n=3, search=beams(3))
    it.add(range(14), max_tokens=3, n=3, search=beams(3))
    it.run()
    it.verify()


@pytest.mark.parametrize("index", [None, 0, 2])
def test_abort_anywhere(index: int | None) -> None:
    for delay in range(8):
        it = World(limits=limits(tokens=7))
        request = it.add(range(9), max_tokens=12, n=2, search=beams(5))
        other = it.add(range(50, 60), max_tokens=12, n=2)
        for _ in range(delay):
            it.step()
        it.abort(request, index)
        it.step()
        assert [it.streams[request, i].finish for i in range(2)] == [FinishReason.ABORT] * 2
        assert all(sequence.request.id == other for sequence in it.engine._state.running)
        it.run()
        it.verify()


@pytest.mark.parametrize("way", ["raises", "spoiled"])
def test_a_bad_beam_ends_its_search_alone(way: str) -> None:
    it = World()
    search = it.add(range(9), max_tokens=12, n=2, search=beams(4))
    others = [it.add(range(50, 60), max_tokens=12), it.add(range(70, 80), max_tokens=5, n=3, search=beams(3))]
    for _ in range(3):
        it.step()
    setattr(it.runner, way, lambda row: row.tokens[0] == 0 and row.index == 2)
    it.run()
    assert all(it.streams[search, i].error for i in range(2))
    for request in others:
        assert it.streams[request, 0] == it.expected(request, 0)


def test_a_new_engine_begins_anew() -> None:
    """What is sent again is the Submit itself: no token of it was sent."""
    it = World()
    it.add(range(10), max_tokens=6, n=3, search=beams(4))
    submit = it.inbox[0]
    it.step()
    it.step()
    again = World()
    again.add(range(10), max_tokens=6, n=3, search=beams(4))
    again.inbox = [submit]
    again.run()
    again.verify()


@pytest.mark.parametrize(
    ("width", "n", "prompt", "more", "message"),
    [
        (5, 1, 9, {}, "beam_width: must be between n = 1 and the 4 sequences that run at once"),
        (2, 3, 9, {}, "beam_width: must be between n = 3 and the 4 sequences that run at once"),
        (4, 4, 50, {}, "beam_width: 4 beams of 50 tokens need more than 16 blocks"),
        (2, 2, 9, {"generated": [[1], []]}, "generated: a search begins anew"),
    ],
)
def test_refusals(width: int, n: int, prompt: int, more: dict[str, Any], message: str) -> None:
    it = World(blocks=16, limits=limits(seqs=4))
    request = it.add(range(prompt), max_tokens=8, n=n, search=beams(width), **more)
    it.step()
    assert [it.streams[request, i].error for i in range(n)] == [message] * n
    it.run()


def test_a_search_that_has_the_pool_to_itself_ends() -> None:
    """Its beams may become as long as the pool holds at worst."""
    for blocks in range(14, 30):
        it = World(blocks=blocks)
        it.add(range(9), max_tokens=10_000, n=4, search=beams(4))
        it.run()
        it.verify()
        assert it.last is not None
        assert it.last.stats.preemptions == 0


# ---- seats ----


def test_a_search_has_seats_for_all_its_beams() -> None:
    """invariants.check counts those of beams that are not born yet too."""
    it = World(blocks=200, limits=limits(tokens=8, seqs=6))
    searches = [it.add(range(start, start + 20), max_tokens=4, search=beams(4)) for start in (0, 100)]
    single = it.add(range(200, 220), max_tokens=20)
    while searches[0] not in it.started or not it.streams[searches[0], 0].finish:
        it.step()
        assert searches[1] not in it.started
    assert single in it.started, "it passes the one that does not fit"
    it.run()
    it.verify()


def test_small_requests_do_not_starve_a_search() -> None:
    it = World(blocks=400, limits=limits(seqs=4))
    for start in range(4):
        it.add([start, 30], max_tokens=6 + start)
    it.step()
    search = it.add(range(9), max_tokens=4, search=beams(4))
    for number in range(60):
        it.add([number % 40, 31, number], max_tokens=7)
        it.step()
    assert it.streams[search, 0].finish is FinishReason.LENGTH
    it.run()
    it.verify()


def test_a_search_of_a_tenant_that_is_owed_waits_for_seats() -> None:
    it = World(blocks=400, limits=limits(seqs=6))
    for start in range(40):
        it.add([start, 30], max_tokens=10 + start % 7, tenant="many")
    it.step()
    search = it.add(range(9), max_tokens=4, n=2, search=beams(3), tenant="one")
    it.run()
    it.verify()
    assert it.order.index(search) < 30


# ---- whatever happens ----


def add(it: World, rng: random.Random) -> None:
    """A search more often than not; prompts share beginnings."""
    prompt = ([rng.randrange(2), 1, 0, 2] * 6)[: rng.choice([1, 8, 17, 24])] + [rng.randrange(3)] * rng.randrange(8)
    width = rng.choice([4, 4, 6, 8])
    search = beams(
        width, length_penalty=rng.choice([0.0, 1.0, 2.0]), early_stopping=rng.choice([False, True, "never", "never"])
    )
    it.add(
        prompt,
        max_tokens=rng.choice([0, 3, 9, 16, 16]),
        n=rng.choice([1, 2, 4]),
        stops=(2, WORDS - 1) if rng.random() < 0.5 else (),
        search=search if rng.random() < 0.6 else None,
        seed=rng.randrange(3),
        tenant=rng.choice(["", "", "a"]),
    )


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(24, 40),
    seats=st.sampled_from([8, 16, 32]),
    tokens=st.sampled_from([4, 16, 64]),
    hopeful=st.booleans(),
    caching=st.booleans(),
    switch=st.sampled_from([None, None, 28, 34]),
)
def test_any_mix(
    seed: int, blocks: int, seats: int, tokens: int, hopeful: bool, caching: bool, switch: int | None
) -> None:
    """Searches, forks, preemptions and aborts: every step leaves a sound pool, the end an empty one, and every beam is
    the oracle's. Hypothesis finds the machine, `seed` the traffic: what it would make of that itself is too meek."""
    rng = random.Random(seed)
    it = World(blocks, 4, caching, limits(tokens, seats, switch))
    guess, quantile = (1, 0.0) if hopeful else (estimate.FIRST_GUESS, estimate.QUANTILE)
    with patch.multiple(estimate, FIRST_GUESS=guess, MIN_REMAINING=guess, QUANTILE=quantile):
        for number in range(8):
            add(it, rng)
            if rng.random() < 0.2:
                it.abort(rng.randint(1, number + 1), rng.choice([None, 0, 1]))
            for _ in range(rng.choice([0, 1, 2, 6])):
                it.step()
        it.run()
    it.verify()
