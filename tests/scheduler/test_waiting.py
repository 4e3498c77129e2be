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


# ---- several tenants ----


def owned(id: int, tenant: str, length: int = 1, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=1, seed=0)
    submit = Submit(id=id, prompt_ids=[1] * length, params=params, priority=priority, tenant=tenant, arrival=float(id))
    return Request(submit, 1000).sequences[0]


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.request.id for sequence in sequences]


def test_who_had_least_goes_first() -> None:
    queue = WaitingQueue()
    for name, service in (("a", 50), ("b", 10), ("c", 10)):
        queue.tenants.join(name, 1.0)
        queue.tenants.charge(name, service, 0)
    for id, name in enumerate("aabbccaa", 1):
        queue.add(owned(id, name, 20))
    # b and c alternate, 20 tokens each, until they reach a.
    assert ids(queue.first(8)) == [3, 5, 4, 6, 1, 2, 7, 8]
    assert ids(queue.heads(9)) == [3, 5, 1]
    queue.tenants.charge("b", 100, 0)
    assert ids(queue.first(8)) == [5, 6, 1, 2, 7, 3, 8, 4]
    queue.add(owned(9, "b", 20, priority=-1))
    assert ids(queue.first(2)) == [9, 5], "priority first"
    assert queue.check()


def test_weight_deals_more_often() -> None:
    queue = WaitingQueue()
    queue.tenants.join("light", 1.0)
    queue.tenants.join("heavy", 3.0)
    for id in range(1, 9):
        queue.add(owned(id, "light" if id < 3 else "heavy", 30))
    assert ids(queue.first(8)) == [1, 3, 4, 5, 2, 6, 7, 8]


def test_preempted_first_among_its_tenant_s() -> None:
    queue = WaitingQueue()
    for name, service in (("a", 50), ("b", 10)):
        queue.tenants.join(name, 1.0)
        queue.tenants.charge(name, service, 0)
    late = owned(3, "a")
    late.preempted = True
    for sequence in (owned(1, "a"), owned(2, "b"), late):
        queue.add(sequence)
    assert ids(queue.first(3)) == [2, 3, 1]


def test_random_operations_of_many_tenants() -> None:
    """Against a model: repeatedly take the first of the tenant that would have had least."""
    rng = random.Random(0)
    queue = WaitingQueue()
    model: list[Sequence] = []
    names = [str(number) for number in range(12)]
    for number, name in enumerate(names):
        queue.tenants.join(name, 1.0 + number % 3)
    for id in range(1, 600):
        what = rng.random()
        if what < 0.2:
            queue.tenants.charge(rng.choice(names), rng.randrange(200), rng.randrange(5))
        elif what < 0.5 and model:
            queue.remove(model.pop(rng.randrange(len(model))))
        else:
            model.append(owned(id, rng.choice(names), rng.randrange(1, 100), rng.randrange(2)))
            queue.add(model[-1])
        left = sorted(model, key=lambda s: s.place)
        service = {name: queue.tenants.service(name) for name in names}
        expected: list[Sequence] = []
        for priority in (0, 1):
            virtual = dict(service)
            while mine := [s for s in left if s.rank[0] == priority]:
                heads = {s.request.tenant: s for s in reversed(mine)}
                chosen = min(heads.values(), key=lambda s: (virtual[s.request.tenant], s.place))
                virtual[chosen.request.tenant] += len(chosen.tokens) / queue.tenants.weight(chosen.request.tenant)
                left.remove(chosen)
                expected.append(chosen)
        assert ids(queue.first(20)) == ids(expected[:20])
        assert list(queue) == expected
        assert queue.check()
