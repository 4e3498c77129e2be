"""The waiting queue against a sorted list."""

from __future__ import annotations

import random

import pytest

from scheduler.messages import SamplingParams, Submit
from scheduler.sequence import Request, Sequence
from scheduler.waiting import WaitingQueue


def sequence(id: int, priority: int = 0, arrival: float = 0.0, preempted: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=1, seed=0)
    submit = Submit(id=id, prompt_ids=[1] * id, params=params, priority=priority, arrival=arrival)
    made = Request(submit, 1000).sequences[0]
    made.preempted = preempted
    return made


def test_order() -> None:
    queue = WaitingQueue()
    urgent, preempted, early, late = (
        sequence(1, -1, 9.0),
        sequence(2, 0, 8.0, True),
        sequence(3, 0, 1.0),
        sequence(4, 0, 2.0),
    )
    for it in (late, preempted, urgent, early):
        queue.add(it)
    assert list(queue) == [urgent, preempted, early, late]
    assert queue.first(2) == [urgent, preempted]
    assert queue.tokens == 10


def test_random_operations() -> None:
    rng = random.Random(0)
    queue = WaitingQueue()
    model: list[Sequence] = []
    for id in range(1, 400):
        if model and rng.random() < 0.45:
            gone = model.pop(rng.randrange(len(model)))
            queue.remove(gone)
            with pytest.raises(ValueError, match="does not wait"):
                queue.remove(gone)
        else:
            model.append(sequence(id, rng.randrange(3), rng.randrange(5), rng.random() < 0.3))
            queue.add(model[-1])
        model.sort(key=lambda s: s.place)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert queue.tokens == sum(len(s.tokens) for s in model)
