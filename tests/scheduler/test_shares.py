"""A polite tenant beside a hostile one, and shares by weight. Time is simulated: every figure is exact."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from scheduler.fairness import EVEN
from scheduler.limits import Limits
from tests.scheduler.conftest import World
from tests.scheduler.test_fairness import Machine

TWO_CORES = Machine(0.027, 0.003, 0.0045, 1.0e-6, 0.0)
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=10_000, target_step_time=0.1)


def polite(it: World, prompt: int, number: int, output: int = 6) -> tuple[float, int]:
    """Seconds to the first token of a request that comes just as a step begins, and the most steps between two tokens
    of its answer."""
    came = it.now
    if it.engine.has_work:
        it.step()
    request = it.add([number, *range(prompt - 1)], max_tokens=output, tenant="polite", salt=b"polite", seed=number)
    steps: list[int] = []
    taken = 0
    while not it.streams[request, 0].finish:
        had = len(it.times[request])
        it.step()
        taken += 1
        steps += [taken] * (len(it.times[request]) > had)
        assert taken < 500
    assert it.streams[request, 0] == it.expected(request, 0)
    return it.times[request][0] - came, max(b - a for a, b in pairwise(steps))


def computed(it: World) -> int:
    """Prompt tokens so far."""
    assert it.last is not None
    return it.last.stats.computed_tokens


def flood(it: World, prompt: int, output: int, count: int = 64) -> list[int]:
    """The hostile tenant's requests, all at once."""
    return [
        it.add([number % 40, *range(prompt - 1)], max_tokens=output, tenant="hostile", salt=b"%d" % number)
        for number in range(count)
    ]


@pytest.mark.parametrize("length", [20, 100, 300])
@pytest.mark.parametrize(
    ("blocks", "size", "prompt", "output", "count", "before"),
    [
        pytest.param(400, 64, 20, 4000, 80, 90, id="every seat taken by streams"),
        pytest.param(300, 64, 4000, 4000, 64, 30, id="long prompts"),
        pytest.param(300, 64, 4000, 1, 64, 30, id="nothing but prompts"),
        pytest.param(200, 16, 100, 4000, 64, 400, id="the pool full"),
    ],
)
def test_time_to_first_token_beside_a_hostile_tenant(
    length: int, blocks: int, size: int, prompt: int, output: int, count: int, before: int
) -> None:
    """64 requests of 4,000 tokens raise another tenant's time to first token at most threefold."""
    alone, beside = World(blocks, size, limits=LIMITS), World(blocks, size, limits=LIMITS)
    for it in (alone, beside):
        it.runner.seconds = TWO_CORES
        for number in range(8):  # The cost model learns the machine.
            polite(it, length, number)
    hostile = flood(beside, prompt, output, count)
    for _ in range(before):
        beside.step()
    usual = [polite(alone, length, number)[0] for number in range(20, 24)]
    found = [polite(beside, length, number) for number in range(20, 24)]
    assert max(seconds for seconds, _ in found) <= 3 * median(usual)
    assert max(steps for _, steps in found) <= 1, "its answers get a token in every step"
    done = sum(len(beside.streams[request, 0].tokens) for request in hostile) + computed(beside)
    for _ in range(20):
        beside.step()
    assert sum(len(beside.streams[request, 0].tokens) for request in hostile) + computed(beside) > done, (
        "nor is that one"
    )


def test_streams_sit_out_no_two_steps_in_a_row() -> None:
    """While a prompt of a tenant that had less is computed, those of the greedy one have every other step at least."""
    it = World(400, 64, limits=LIMITS)
    it.runner.seconds = TWO_CORES
    hostile = flood(it, 20, 4000, 60)
    for _ in range(90):
        it.step()
    usual = median(b - a for a, b in pairwise(it.times[hostile[0]][-20:]))
    begin = it.now
    long = it.add(range(900), max_tokens=1, tenant="polite")
    rested = 0
    while not it.streams[long, 0].finish:
        had = len(it.times[hostile[0]])
        it.step()
        rested += len(it.times[hostile[0]]) == had
    assert rested > 3
    for request in hostile:
        assert max(b - a for a, b in pairwise(it.times[request]) if b > begin) <= 3 * usual


def test_a_seat_is_given_up_once_not_for_each_request() -> None:
    it = World(400, 64, limits=LIMITS)
    it.runner.seconds = TWO_CORES
    flood(it, 20, 4000, 80)
    for _ in range(90):
        it.step()
    assert it.last is not None
    assert (it.last.stats.running, it.last.stats.preemptions) == (64, 0)
    for number in range(10):
        polite(it, 30, number)
    assert it.last.stats.preemptions == 1


def test_seats_go_to_and_fro_no_further_than_half_a_share() -> None:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=10_000)
    it = World(4000, 16, limits=limits)
    flood(it, 20, 400, 40)
    for _ in range(20):
        it.step()
    for number in range(40):
        it.add([number, *range(19)], max_tokens=400, tenant="other", salt=b"other", seed=number)
    for _ in range(60):
        it.step()
    held = [sequence.request.tenant for sequence in it.engine._state.running]
    assert held.count("other") == 4, "half of its half; the rest as seats become free"
    assert it.last is not None
    assert it.last.stats.preemptions == 4
    for _ in range(300):
        it.step()
    assert it.last.stats.preemptions == 4


def test_who_is_most_urgent_gives_no_seat() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=10_000)
    it = World(400, 16, limits=limits)
    for number in range(4):
        it.add([number] * 5, max_tokens=30, tenant="urgent", priority=-1)
    it.step()
    it.add([9] * 5, max_tokens=5, tenant="other")
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.preemptions == 0


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_service_of_two_that_always_wait_follows_their_weights(weight: float) -> None:
    """What one is ahead of the other is bounded by what all seats hold, however long it goes on."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=10_000)
    it = World(400, 16, limits=limits)
    prompt, output, count = 30, 10, 120
    for number in range(count):
        for name, its in (("a", 1.0), ("b", weight)):
            it.add([number % 40, *range(prompt - 1)], output, tenant=name, weight=its, salt=name.encode(), seed=number)
    tenants = it.engine._state.tenants
    worst = 0.0
    while True:
        it.step()
        waiting = {s.request.tenant for s in it.engine._state.waiting}
        if len(waiting) < 2:
            break
        worst = max(worst, abs(tenants.service("a") - tenants.service("b")))
    bound = limits.max_num_seqs * (prompt + 2 * output)
    assert worst <= bound
    had = tenants.service("a") + weight * tenants.service("b")
    assert had > 5 * bound, "it went on for long enough to tell"
    it.run()
    it.verify()


@pytest.mark.usefixtures("hopeful")
def test_recomputing_is_not_charged() -> None:
    """Preempted or not, forked or not, a request costs its tenant the same."""
    for blocks in (400, 14):
        it = World(blocks, 4, limits=Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=400))
        for number in range(3):
            it.add([number] * 12, max_tokens=20, n=1 + number % 2, tenant="a", salt=b"%d" % number)
        it.run()
        it.verify()
        assert it.last is not None
        assert (it.last.stats.preemptions > 0) == (blocks == 14)
        _, tenant = it.engine._state.tenants._idle["a"]
        prompt = 12 + 12 * 12 / 2 / EVEN
        assert tenant.service == pytest.approx(3 * prompt + 2 * 4 * 20)
