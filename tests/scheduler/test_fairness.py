"""Over many steps: streams go on beside long prompts, nobody starves, nothing stands still. Time is simulated."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import pytest

from model.batch import Batch
from scheduler.limits import Limits
from scheduler.messages import FinishReason

if TYPE_CHECKING:
    from tests.scheduler.conftest import World


class Machine:
    """What a step takes on an imaginary CPU, in seconds."""

    def __init__(self, base: float, row: float, token: float, pair: float, noise: float, seed: int = 0) -> None:
        self.base, self.row, self.token, self.pair, self.noise = base, row, token, pair, noise
        self.rng = random.Random(seed)

    def __call__(self, batch: Batch) -> float:
        seconds = self.base
        for row in batch.rows:
            if row.count == 1:
                seconds += self.row + 0.1 * self.pair * row.start
            else:
                seconds += self.token * row.count + self.pair * row.count * (row.start + row.count / 2)
        return seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)


MACHINES = {
    "two cores": Machine(0.027, 0.003, 0.0045, 1.0e-6, 0.1),
    "slow": Machine(0.4, 0.02, 0.06, 1.0e-5, 0.1),
    "fast": Machine(0.004, 0.0002, 0.0002, 2.0e-8, 0.15),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("streams", [1, 8])
def test_streams_go_on_beside_a_long_prompt(world: type[World], name: str, streams: int) -> None:
    """No stream waits longer than three times its usual gap, and the long prompt finishes."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4000, target_step_time=0.1)
    it = world(blocks=600, block_size=16, limits=limits)
    it.runner.seconds = MACHINES[name]
    for number in range(streams):
        it.add([number] * 20, max_tokens=3000)
    for _ in range(60):
        it.step()
    usual = median(b - a for a, b in pairwise(it.times[1]))
    long = it.add(range(800), max_tokens=1)
    begin = it.now
    steps = 0
    while not it.streams[long, 0].finish:
        it.step()
        steps += 1
        assert steps < 1500
    for number in range(1, streams + 1):
        gaps = [b - a for a, b in pairwise(it.times[number]) if b > begin]
        assert max(gaps) <= 3 * usual
    for number in range(1, streams + 1):
        it.abort(number)
    it.run()
    it.verify()


@pytest.mark.parametrize("name", MACHINES)
def test_a_crowd_of_prompts_is_not_kept_waiting_for_a_few_streams(world: type[World], name: str) -> None:
    """32 clients in closed loop, 256 tokens in and 64 out: half of them stream at a time, and gaps are bounded."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4000, target_step_time=0.1)
    it = world(blocks=2000, block_size=16, limits=limits)
    it.runner.seconds = machine = MACHINES[name]
    for number in range(64):
        it.add([number % 40, number // 40, *range(254)], max_tokens=64, seed=number)
        if number < 32:
            continue
        while sum(not stream.finish for stream in it.streams.values()) > 32:
            it.step()
    rows = [len(batch) for batch in it.runner.batches[len(it.runner.batches) // 3 :]]
    assert median(rows) >= 16
    it.run()
    it.verify()
    gaps = [b - a for number in it.times for a, b in pairwise(it.times[number])]
    step = machine.base + 32 * machine.row
    assert max(gaps) <= 12 * max(step, 0.1)


def test_short_prompts_pass_a_long_one_that_finishes_too(world: type[World]) -> None:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=10_000)
    it = world(blocks=1000, limits=limits)
    long = it.add(range(1500), max_tokens=1)
    it.step()
    waits = []
    for number in range(200):
        short = it.add([number % 30, *range(19)], max_tokens=1, seed=number)
        steps = 0
        while not it.streams[short, 0].finish:
            it.step()
            steps += 1
        waits.append(steps)
        if it.streams[long, 0].finish:
            break
    assert max(waits) <= 2
    # Short ones come all the time; the long one has half of each step all the same.
    assert sum(waits) <= 1500 // 32 + 1
    it.run()
    it.verify()


def test_head_that_does_not_fit_is_not_starved(world: type[World]) -> None:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=10_000)
    it = world(blocks=40, limits=limits)
    for number in range(3):
        it.add([number] * 20, max_tokens=20)
    it.step()
    head = it.add(range(100), max_tokens=40)
    for number in range(300):
        it.add([number % 30, 1, 2], max_tokens=12, seed=number)
        it.step()
        if head in it.started:
            break
    assert head in it.started
    passed = it.order.index(head) - 3
    assert 0 < passed <= limits.max_bypasses + 8, "some pass it, not all"
    it.run()
    it.verify()


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("seed", range(3))
def test_under_steady_pressure_tokens_keep_coming(world: type[World], seed: int) -> None:
    """Prompts of 30-60 % of the pool, turn after turn: something is computed in every step."""
    rng = random.Random(seed)
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=32, max_model_len=10_000)
    it = world(blocks=40, limits=limits)
    for turn in range(40):
        for _ in range(2):
            size = rng.randrange(48, 97)
            it.add([rng.randrange(3), *range(size)], max_tokens=rng.randrange(1, 30), seed=turn)
        if rng.random() < 0.3:
            it.abort(rng.randrange(1, len(it.submits) + 1))
        for _ in range(8):
            before = it.last.stats.steps if it.last else 0
            busy = it.engine.has_work or bool(it.inbox)
            output = it.step()
            assert not (busy and it.engine.has_work) or output.stats.steps == before + 1
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.preemptions > 0


@pytest.mark.usefixtures("hopeful")
def test_preemptions_are_bounded(world: type[World]) -> None:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=10_000)
    it = world(blocks=30, limits=limits)
    for number in range(10):
        it.add([number] * 10, max_tokens=60)
    worst = 0
    while it.inbox or it.engine.has_work:
        it.step()
        worst = max(worst, *(s.preemptions for s in it.engine._state.running), 0)
    it.verify()
    assert it.last is not None
    assert it.last.stats.preemptions > 3
    assert worst <= limits.max_preemptions + 1


@pytest.mark.usefixtures("hopeful")
def test_oldest_of_the_highest_priority_is_never_preempted(world: type[World]) -> None:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=10_000)
    it = world(blocks=30, limits=limits)
    for number in range(6):
        it.add([number] * 10, max_tokens=60, priority=1)
    it.step()
    urgent = it.add(range(10), max_tokens=60, priority=0)
    while not it.streams[urgent, 0].finish:
        it.step()
        mine = [s for s in (*it.engine._state.running, *it.engine._state.waiting) if s.request.id == urgent]
        assert all(s.preemptions == 0 for s in mine)
    it.run()
    it.verify()


def test_waiting_ones_are_served_in_order(world: type[World]) -> None:
    it = world(limits=Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100))
    for number in range(12):
        it.add([number] * 9, max_tokens=5, priority=number % 3)
    it.run()
    assert it.order == [1, 4, 7, 10, 2, 5, 8, 11, 3, 6, 9, 12]
    assert {stream.finish for stream in it.streams.values()} == {FinishReason.LENGTH}
