"""Tenants: who is charged what, where one begins that was idle, and what is forgotten."""

from __future__ import annotations

import pytest

from scheduler.fairness import LINGER_SECONDS, MOST_IDLE, Tenants


def tenants(**services: int) -> Tenants:
    """Active ones of weight 1 that wait and have had so much."""
    made = Tenants()
    for name in services:
        made.join(name, 1.0)
        made.wait(name, 1)
    made.settle(0.0)
    for name, service in services.items():
        made.charge(name, service, 0)
    return made


def begin(made: Tenants, name: str, now: float = 0.0) -> float:
    """Its first request comes; its service then."""
    made.join(name, 1.0)
    made.wait(name, 1)
    made.settle(now)
    return made.service(name)


def test_a_generated_token_counts_twice_and_weight_divides() -> None:
    made = Tenants()
    made.join("a", 4.0)
    made.charge("a", 100, 10)
    assert made.service("a") == (100 + 2 * 10) / 4


def test_idling_saves_nothing_up() -> None:
    made = tenants(a=100, b=300)
    assert begin(made, "new") == 100
    made.charge("new", 500, 0)
    made.wait("new", -1)
    made.leave("new")
    assert begin(made, "new") == 600, "nor does leaving pay a debt"
    made.wait("a", -1)
    made.charge("b", 700, 0)
    assert begin(made, "a") == 600, "all its requests were served; the least of those that waited"


def test_where_nobody_waits_the_past_does_not_count() -> None:
    made = tenants(a=100, b=300)
    made.wait("a", -1)
    made.wait("b", -1)
    assert begin(made, "new") == 300
    for name in ("a", "b", "new"):
        made.leave(name)
    made = tenants(a=100)
    made.wait("a", -1)
    made.leave("a")
    made.join("b", 1.0)
    assert begin(made, "b") == 100 == begin(made, "a"), "both begin with what is remembered"


def test_those_that_come_together_begin_together() -> None:
    made = tenants(a=100)
    for name in ("b", "c"):
        made.join(name, 1.0)
        made.wait(name, 1)
    made.settle(0.0)
    assert made.service("b") == made.service("c") == 100


def test_idle_ones_are_forgotten() -> None:
    made = Tenants()
    for number in range(2 * MOST_IDLE):
        made.join(str(number), 1.0)
        made.leave(str(number))
        made.settle(1.0)
    assert len(made) == MOST_IDLE
    made.settle(1.0 + LINGER_SECONDS)
    assert len(made) == 0


@pytest.mark.parametrize(("weight", "taken"), [(2.5, 2.5), (0.0, 1e-3), (float("nan"), 1e-3), (float("inf"), 1e3)])
def test_weights_are_bounded(weight: float, taken: float) -> None:
    made = Tenants()
    made.join("a", weight)
    assert made.weight("a") == taken


def test_shares() -> None:
    made = Tenants()
    assert made.share("a") == 1.0
    made.join("a", 1.0)
    assert (made.share("a"), made.contended) == (1.0, False)
    made.join("b", 3.0)
    assert (made.share("a"), made.share("b"), made.contended) == (0.25, 0.75, True)
    made.join("b", 1.0)
    assert made.share("a") == 0.5, "the last request says the weight"
    assert made.check(["a", "b", "b"])
    assert not made.check(["a", "b"])


def test_newcomers_at_one_floor_starve_nobody() -> None:
    """One waits with more than the others, each of which asks for 100 tokens and is never seen again."""
    made = tenants(old=0, other=0)
    made.charge("old", 1000, 0)
    for number in range(1000):
        if begin(made, str(number)) > made.service("old"):
            break
        made.charge(str(number), 100, 0)
        made.wait(str(number), -1)
        made.leave(str(number))
    assert 5 < number < 40
