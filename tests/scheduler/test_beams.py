"""Which beams go on, which have ended, and when a search is over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.params import Logprob
from scheduler.beams import Beams, Move, most_tokens
from scheduler.messages import BeamSearch
from tests.scheduler.searching import Found, following, likeliest, search_slowly


def beams(width: int, ends: tuple[int, ...] = (), most: int = 100, **fields: Any) -> Beams:
    return Beams(BeamSearch(width=width, **fields), ends, most, 1)


def others(**logprobs: float) -> list[Logprob]:
    ids = [int(name[1:]) for name in logprobs]
    return [Logprob(0.0, 1, ids, list(logprobs.values()))]


def test_the_likeliest_of_all_beams_go_on() -> None:
    it = beams(2)
    it.note(0, others(t1=-1.0, t2=-1.5))
    assert it.advance() == [Move(0, 0, 1), Move(1, 0, 2)]
    it.note(0, others(t5=-2.0, t6=-3.0))
    assert not it.complete
    it.note(1, others(t5=-0.1, t7=-9.0))
    assert it.complete
    assert it.advance() == [Move(1, 1, 5), Move(0, 0, 5)], "each stays where it is; the best comes first"
    assert [beam.logprob for beam in it.live.values()] == pytest.approx([-1.6, -3.0])
    assert [step.token for step in it.live[1].steps()] == [2, 5]


def test_a_beam_that_dies_leaves_its_slot() -> None:
    it = beams(2)
    it.note(0, others(t1=-1.0, t2=-5.0))
    it.advance()
    it.note(0, others(t5=-1.0, t6=-1.1))
    it.note(1, others(t5=-1.0, t6=-1.1))
    assert it.advance() == [Move(0, 0, 5), Move(1, 0, 6)]


def test_an_end_makes_room_for_another() -> None:
    it = beams(2, ends=(2,))
    it.note(0, others(t2=-0.1, t5=-2.0, t6=-3.0))
    assert [move.token for move in it.advance()] == [5, 6]
    [(score, beam)] = it.ended
    assert (score, beam.stopped, beam.steps()) == (-0.1, True, [beam])


def test_an_end_behind_the_width_likeliest_does_not_count() -> None:
    it = beams(2, ends=(2,))
    it.note(0, others(t5=-0.1, t6=-2.0, t2=-3.0))
    it.advance()
    assert it.ended == []


def test_a_token_keeps_what_the_client_asked_for() -> None:
    it = beams(2)
    it.note(0, others(t1=-1.0, t2=-1.5))
    it.advance()
    assert [beam.value for beam in it.live.values()] == [
        Logprob(-1.0, 1, [1], [-1.0]),
        Logprob(-1.5, 2, [1], [-1.0]),
    ]


@pytest.mark.parametrize(("early", "rounds"), [(True, 2), (False, 3), ("never", 4)])
def test_when_it_is_over(early: Any, rounds: int) -> None:
    """From round 2 on two have ended, the worse with the score -1. What goes on has the mean -0.6 in round 2,
    -1.2 in round 3 and -3.15 in round 4: over ten tokens that would be -0.36, then -1.26."""
    it = beams(2, ends=(2,), most=10, early_stopping=early)
    far = others(t5=-20.0, t6=-21.0)
    said = [
        [others(t5=-0.5, t2=-1.0, t6=-3.0)],
        [others(t2=-0.6, t5=-0.7, t6=-9.0), far],
        [others(t5=-2.4, t6=-20.0), far],
        [others(t5=-9.0, t6=-20.0), far],
    ]
    while not it.done:
        for slot, found in zip(it.live, said[it.length], strict=True):
            it.note(slot, found)
        it.advance()
    assert it.length == rounds
    assert [score for score, _ in it.ended] == pytest.approx([-0.55, -1.0])


def test_no_candidates_end_a_search() -> None:
    it = beams(3)
    it.note(0, [])
    assert it.advance() == []
    assert it.done
    assert it.ended == []


SEARCHES = st.builds(
    BeamSearch,
    width=st.sampled_from([1, 2, 3, 4, 8, 16]),
    length_penalty=st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)


@settings(max_examples=150, deadline=None)
@given(search=SEARCHES, ends=st.sets(st.integers(0, 11), max_size=4), most=st.integers(1, 7), seed=st.integers(0, 99))
def test_it_finds_what_whole_distributions_give(search: BeamSearch, ends: set[int], most: int, seed: int) -> None:
    """Tokens lie in slots, as a scheduler's tables would, and only ever move as the moves say."""
    it = Beams(search, ends, most)
    tokens: dict[int, list[int]] = {0: []}
    while not it.done:
        assert tokens.keys() == it.live.keys()
        assert {slot: [step.token for step in beam.steps()] for slot, beam in it.live.items()} == tokens
        for slot in it.live:
            it.note(slot, [likeliest(tokens[slot], seed, it.wanted)])
        moves = it.advance()
        assert not {move.slot for move in moves if move.slot != move.source} & {move.source for move in moves}
        tokens = {slot: [*tokens[source], token] for slot, source, token in moves}
    found: list[Found] = [([s.token for s in b.steps()], b.logprob, b.stopped) for _, b in it.ended]
    assert found == search_slowly(search, ends, most, lambda generated: following(generated, seed))


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 500), st.integers(1, 16))
def test_beams_fit_the_pool_at_worst(prompt: int, width: int, blocks: int, size: int) -> None:
    most = most_tokens(prompt, width, blocks, size)
    shared = prompt // size
    if most > prompt:
        assert shared + width * (most // size - shared) + width // 2 <= blocks
    assert shared + width * (most // size + 1 - shared) + width // 2 > blocks
    if width == 1:
        assert most == blocks * size
