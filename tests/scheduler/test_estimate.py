"""Expected lengths and the predicted peak, against a simulation of the running set."""

from __future__ import annotations

import random

import pytest

from kvpool.pool import KVPool
from scheduler.estimate import FIRST_GUESS, MIN_REMAINING, OutputLengths, Peak
from scheduler.messages import SamplingParams, Submit
from scheduler.sequence import Request, Sequence


def sequence(prompt: int, generated: int, max_tokens: int, id: int = 1) -> Sequence:
    submit = Submit(
        id=id,
        prompt_ids=[1] * prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=0),
        generated=[[1] * generated] if generated else [],
    )
    return Request(submit, 100_000).sequences[0]


def test_guess_before_anything_ended() -> None:
    lengths = OutputLengths()
    assert lengths.remaining(sequence(5, 0, 10)) == 10
    assert lengths.remaining(sequence(5, 0, 90_000)) == FIRST_GUESS
    assert lengths.remaining(sequence(5, 100, 90_000)) == FIRST_GUESS - 100
    assert lengths.remaining(sequence(5, 5000, 90_000)) == MIN_REMAINING


def test_learns_and_forgets() -> None:
    lengths = OutputLengths()
    lengths.observe(3)
    assert lengths.remaining(sequence(5, 0, 90_000)) == FIRST_GUESS, "one short answer says little"
    for _ in range(300):
        lengths.observe(1000)
    assert lengths.remaining(sequence(5, 0, 90_000)) == 1000
    for _ in range(300):
        lengths.observe(40)
    assert lengths.remaining(sequence(5, 0, 90_000)) == 40


def test_a_preemption_doubles_it() -> None:
    lengths = OutputLengths()
    it = sequence(5, 0, 90_000)
    it.preemptions = 2
    assert lengths.remaining(it) == 4 * FIRST_GUESS
    it.preemptions = 100
    assert lengths.remaining(it) == 90_000


def simulated_peak(running: list[tuple[int, int]], size: int) -> int:
    """Blocks at worst, stepping (tokens, remaining) forward one token at a time."""
    peak = 0
    while running:
        peak = max(peak, sum(-(-tokens // size) for tokens, _ in running))
        running = [(tokens + 1, left - 1) for tokens, left in running if left > 0]
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_peak_against_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    size = 4
    pool = KVPool(10_000, size)
    peak = Peak(pool, [], OutputLengths(), capacity=10_000)
    shapes = [(rng.randrange(1, 200), rng.randrange(1, 250)) for _ in range(rng.randrange(1, 12))]
    for number, (prompt, remaining) in enumerate(shapes):
        assert peak.admit(sequence(prompt, 0, remaining, number), 0)
    # The formula grows whole blocks by fractions: it may be off by one block per sequence.
    assert abs(peak.blocks() - simulated_peak(shapes, size)) <= len(shapes)


def test_capacity_decides() -> None:
    pool = KVPool(1000, 4)
    peak = Peak(pool, [], OutputLengths(), capacity=30)
    assert peak.admit(sequence(40, 0, 40, 1), 0)
    assert not peak.admit(sequence(40, 0, 40, 2), 0)
    assert peak.blocks() == 20
    # Most of this one's prompt is in the pool already, on another's account.
    assert not peak.admit(sequence(80, 0, 12, 3), 0)
    assert peak.admit(sequence(80, 0, 12, 3), 19)
    assert peak.blocks() <= 30


def test_shared_blocks_outlive_their_owner() -> None:
    pool = KVPool(1000, 4)
    running = []
    first = pool.new_table()
    assert pool.extend(first, 400, 0)
    for number in range(3):
        it = sequence(400, 0, 4, number)
        it.table = pool.fork(first)
        it.shared = 100
        running.append(it)
    pool.release(first)
    peak = Peak(pool, running, OutputLengths(), capacity=1000)
    assert 100 <= peak.blocks() <= 106


def test_unborn_siblings_count() -> None:
    submit = Submit(id=1, prompt_ids=[1] * 40, params=SamplingParams(max_tokens=40, seed=0), n=4)
    leader = Request(submit, 1000).sequences[0]
    peak = Peak(KVPool(1000, 4), [], OutputLengths(), capacity=1000)
    assert peak.admit(leader, 0)
    assert peak.blocks() == 10 + 3 + 4 * 10
