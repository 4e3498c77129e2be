"""What a step costs, counted in lines of code and in sequences looked at: a clock could hide growth."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import pytest

from scheduler import policy, shares
from scheduler.budget import Budget
from scheduler.limits import Limits
from scheduler.sequence import Sequence
from tests.scheduler.conftest import World

ROWS = 8


class Watched(Sequence):
    """Notes that it was looked at."""

    __slots__ = ()
    seen: ClassVar[set[int]] = set()

    def __getattribute__(self, name: str) -> Any:
        Watched.seen.add(id(self))
        return super().__getattribute__(name)


def lines(call: Callable[[], object]) -> int:
    """Of the scheduler and the pool, executed by a call."""
    counted = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal counted
        if "/scheduler/" not in frame.f_code.co_filename and "/kvpool/" not in frame.f_code.co_filename:
            return None
        if "/tests/" in frame.f_code.co_filename:
            return None
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


def decoding(rows: int = ROWS, prompt: int = 5, **limits: int) -> World:
    """Rows that decode, none about to end or to need a block."""
    most = {"max_num_seqs": rows, "max_num_batched_tokens": rows * 10_000, "max_model_len": 10_000, **limits}
    world = World(blocks=20_000, block_size=16, limits=Limits(**most))
    for number in range(rows):
        world.add([number] * prompt, max_tokens=5_000)
    while world.step().stats.step_tokens != rows:
        pass
    return world


@pytest.mark.parametrize("situation", ["every seat taken", "no room in the pool", "admitting"])
def test_a_step_is_the_same_beside_a_long_queue(situation: str) -> None:
    costs = []
    for waiting in (200, 2_000):
        world = decoding(**{} if situation == "every seat taken" else {"max_num_seqs": 4_000})
        if situation == "no room in the pool":
            # Somebody takes what the rows need for the answers that are expected of them.
            table = world.pool.new_table()
            assert world.pool.extend(table, 16 * (world.pool.num_free - 8 * ROWS), 0)
        if situation == "admitting":
            world.engine._budget = Budget(ROWS + 24)
        for number in range(waiting):
            world.add([number] * 40, max_tokens=5)
        world.engine.step(world.inbox)  # World.step() would check everybody.
        for _ in range(5):  # those that are tried first are hashed
            world.engine.step()
        for sequence in world.engine._state.waiting:
            sequence.__class__ = Watched
        Watched.seen.clear()
        cost = lines(world.engine.step)
        assert len(world.engine._state.waiting) > 150
        costs.append((cost, len(Watched.seen)))
    assert costs[0] == costs[1]
    looked_at = {"every seat taken": (0, 0), "no room in the pool": (0, 0), "admitting": (1, policy.WINDOW)}[situation]
    assert looked_at[0] <= costs[0][1] <= looked_at[1]


def test_a_step_is_linear_in_its_rows_and_indifferent_to_their_contexts() -> None:
    few, some, many = (lines(decoding(rows).engine.step) for rows in (8, 16, 32))
    assert many - some == 2 * (some - few) > 0
    assert lines(decoding(prompt=5).engine.step) == lines(decoding(prompt=16 * 30 + 5).engine.step)


def test_a_burst_of_long_prompts_is_not_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty that begin like one that runs: each is hashed to see whether it had better wait."""
    monkeypatch.setattr(policy, "MAX_BLOCKS", 100)
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=32, max_model_len=10_000)
    world = World(blocks=20_000, block_size=16, limits=limits)
    shared = list(range(16 * 60))
    requests = [world.add([*shared, number], max_tokens=2) for number in range(31)]
    hashed = [0]
    while world.inbox or world.engine.has_work:
        world.step()
        live = [r.sequences[0] for r in world.engine._phases.requests.values()]
        known = sum(len(sequence.hashes) for sequence in live)
        hashed.append(known + 60 * (len(requests) - len(live)))
    assert max(after - before for before, after in itertools.pairwise(hashed)) <= 60 + 100 + 60, "the head, and two"
    assert hashed[-1] == 31 * 60
    world.verify()


@pytest.mark.parametrize("situation", ["every seat taken", "admitting"])
def test_a_step_is_the_same_beside_many_tenants(situation: str) -> None:
    """One with a step's rows, and 200 or 2,000 others that wait."""
    costs = []
    for waiting in (200, 2_000):
        world = decoding(**{} if situation == "every seat taken" else {"max_num_seqs": 4_000})
        if situation == "admitting":
            world.engine._budget = Budget(ROWS + 24)
        for number in range(waiting):
            world.add([number] * 40, max_tokens=5, tenant=str(number), salt=b"%d" % number)
        world.engine.step(world.inbox)
        for _ in range(5):
            world.engine.step()
        for sequence in world.engine._state.waiting:
            sequence.__class__ = Watched
        Watched.seen.clear()
        costs.append((lines(world.engine.step), len(Watched.seen)))
    assert abs(costs[0][0] - costs[1][0]) <= 0.02 * costs[0][0]
    assert costs[0][1] == costs[1][1] <= policy.WINDOW + shares.MOST_HEADS
