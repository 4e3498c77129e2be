"""Whatever tenants ask, in whatever order: each request ends as the oracle says, and invariants hold in every step."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler import estimate
from scheduler.limits import Limits
from scheduler.messages import FinishReason
from tests.scheduler.conftest import World
from tests.scheduler.test_fairness import Machine

STOP = 7
NAMES = ("", "a", "b", "c")


@dataclass(frozen=True)
class Ask:
    """One request, and the steps that pass before it comes."""

    pause: int
    tenant: str
    weight: float
    prompt: list[int]
    output: int
    n: int
    priority: int
    abort: int
    """The request that is aborted with it; 0: none."""


ASKS = st.builds(
    Ask,
    pause=st.sampled_from([0, 0, 0, 1, 3]),
    tenant=st.sampled_from(NAMES),
    weight=st.sampled_from([0.1, 1.0, 1.0, 5.0]),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    output=st.integers(0, 30),
    n=st.sampled_from([1, 1, 1, 3]),
    priority=st.sampled_from([0, 0, 0, 1]),
    abort=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=st.lists(ASKS, min_size=1, max_size=30),
    blocks=st.integers(18, 40),
    seats=st.sampled_from([1, 2, 4, 16]),
    tokens=st.sampled_from([4, 16, 64]),
    timed=st.booleans(),
    hopeful=st.booleans(),
)
def test_everybody_is_served(asks: list[Ask], blocks: int, seats: int, tokens: int, timed: bool, hopeful: bool) -> None:
    limits = Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        max_model_len=70,
        target_step_time=0.1 if timed else None,
        watermark=0.0,
    )
    guess = 1 if hopeful else 32
    with patch.object(estimate, "FIRST_GUESS", guess), patch.object(estimate, "MIN_REMAINING", guess):
        it = World(blocks, 4, limits=limits)
        it.runner.seconds = Machine(0.027, 0.003, 0.0045, 1.0e-6, 0.1)
        for ask in asks:
            for _ in range(ask.pause):
                it.step()
            it.add(
                ask.prompt,
                max_tokens=ask.output,
                n=ask.n,
                priority=ask.priority,
                stops=(STOP,),
                salt=ask.tenant.encode(),
                tenant=ask.tenant,
                weight=ask.weight,
            )
            if 0 < ask.abort < len(it.submits):
                it.abort(ask.abort)
        it.run(most=4000)
        it.verify()
        assert not it.engine._state.tenants.contended


@settings(max_examples=15, deadline=None)
@given(
    period=st.integers(1, 4),
    prompt=st.integers(1, 60),
    output=st.integers(1, 20),
    long=st.integers(60, 150),
    seats=st.sampled_from([1, 2, 8, 32]),
)
def test_a_stream_of_small_requests_of_others_starves_nobody(
    period: int, prompt: int, output: int, long: int, seats: int
) -> None:
    """New tenants keep coming, as many as can be served and more; one that needs most of the pool ends all the same."""
    limits = Limits(max_num_seqs=seats, max_num_batched_tokens=32, max_model_len=400)
    it = World(40, 4, limits=limits)
    request = 0
    for number in range(1500):
        if number % period == 0 and (it.last is None or it.last.stats.waiting < 8):
            it.add([number % 40, *range(prompt - 1)], output, tenant=f"small {number}", salt=b"%d" % number)
        if number == 10:
            request = it.add(range(long), max_tokens=8, tenant="large")
        it.step()
        if request and it.streams[request, 0].finish:
            break
    assert it.streams[request, 0].finish is FinishReason.LENGTH
    it.run()
    it.verify()
