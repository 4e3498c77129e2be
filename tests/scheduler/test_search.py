"""Searches in the engine: rows among others, one prefill, forks after every step; the same beams whatever happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
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
    request = it.add(range(10), max_tokens=6, n=3, search=beams(4), stops=(2, 5))
    while it.engine.has_work or it.inbox:
        output = it.step()
        assert not output.ids or not it.engine.has_work, "nothing is sent before the end"
    it.run()
    it.verify()
    assert {it.streams[request, i].finish for i in range(3)} == {FinishReason.STOP, FinishReason.LENGTH}
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
    it = World(blocks=24, prefix_caching=caching)
    first = it.add(range(10), max_tokens=40)
    for _ in range(30):
        it.step()
    search = it.add(range(100, 110), max_tokens=9, n=4, search=beams(4))
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


@dataclass(frozen=True)
class Ask:
    """One request, and the steps that pass before it comes."""

    pause: int
    prompt: list[int]
    output: int
    n: int
    search: BeamSearch | None
    tenant: str
    abort: tuple[int, int | None] | None
    """The request that is aborted with it, and which sequence."""


ASKS = st.builds(
    Ask,
    pause=st.sampled_from([0, 0, 1, 4]),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    output=st.integers(0, 12),
    n=st.sampled_from([1, 2, 4]),
    search=st.none()
    | st.builds(
        BeamSearch,
        width=st.sampled_from([4, 4, 5, 8]),
        length_penalty=st.sampled_from([1.0, 0.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
    ),
    tenant=st.sampled_from(["", "", "a"]),
    abort=st.none() | st.none() | st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=st.lists(ASKS, min_size=1, max_size=8),
    blocks=st.integers(22, 60),
    seats=st.sampled_from([8, 9, 16]),
    tokens=st.sampled_from([3, 8, 64]),
    hopeful=st.booleans(),
    caching=st.booleans(),
    switch=st.sampled_from([None, None, 12, 20]),
)
def test_any_mix(
    asks: list[Ask], blocks: int, seats: int, tokens: int, hopeful: bool, caching: bool, switch: int | None
) -> None:
    """Searches, forks, preemptions and aborts: every step leaves a sound pool, the end an empty one, and every beam is
    the oracle's."""
    it = World(blocks, 4, caching, limits(tokens, seats, switch))
    guess = 1 if hopeful else estimate.FIRST_GUESS
    with patch.object(estimate, "FIRST_GUESS", guess), patch.object(estimate, "MIN_REMAINING", guess):
        for ask in asks:
            for _ in range(ask.pause):
                it.step()
            if ask.abort is not None:
                it.abort(*ask.abort)
            stops = (2, WORDS - 1)
            it.add(ask.prompt, ask.output, ask.n, stops=stops, search=ask.search, tenant=ask.tenant)
        it.run()
    it.verify()
