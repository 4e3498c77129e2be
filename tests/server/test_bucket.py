from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bucket import Bucket

LIMIT = st.integers(1, 10_000)
STEPS = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 12_000)), max_size=60)
"""Seconds that pass, and what is asked for then."""


@given(LIMIT, STEPS)
def test_never_more_than_a_burst_and_the_rate(limit: int, steps: list[tuple[float, int]]) -> None:
    """Between any two moments."""
    bucket, now = Bucket(limit, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for seconds, amount in steps:
        now += seconds
        if not bucket.wait(amount, now):
            bucket.charge(amount, now)
            taken.append((now, amount))
        assert 0 <= bucket.remaining(now) <= limit
        assert 0 <= bucket.reset(now) <= 60
    for first, (begin, _) in enumerate(taken):
        total = 0
        for end, amount in taken[first:]:
            total += amount
            assert total <= limit + limit * (end - begin) / 60 + 0.01


@given(LIMIT, STEPS)
def test_who_waits_as_told_gets_it_and_not_sooner(limit: int, steps: list[tuple[float, int]]) -> None:
    bucket, now = Bucket(limit, 0.0), 0.0
    for seconds, amount in steps:
        now += seconds
        amount = min(amount, limit)
        wait = bucket.wait(amount, now)
        assert 0 <= wait <= 60
        if wait > 0.01:
            assert bucket.wait(amount, now + wait - 0.01)
        now += wait + 0.001  # the header rounds up to milliseconds
        assert not bucket.wait(amount, now)
        bucket.charge(amount, now)


@given(LIMIT, st.integers(0, 100_000), STEPS)
def test_a_debt_is_paid_off_first(limit: int, debt: int, steps: list[tuple[float, int]]) -> None:
    """Charged without asking, or more than was reserved: over time it is the same number all the same."""
    bucket, now, used = Bucket(limit, 0.0), 0.0, 0
    bucket.charge(debt, now)
    used += debt
    for seconds, amount in steps:
        now += seconds
        assert bucket.remaining(now) >= 0
        if amount and not bucket.wait(amount, now):
            bucket.charge(amount, now)
            used += amount
            assert used <= limit + limit * now / 60 + 0.01


def test_numbers() -> None:
    bucket = Bucket(60, 0.0)
    assert (bucket.remaining(0), bucket.reset(0), bucket.wait(60, 0)) == (60, 0, 0)
    bucket.charge(60, 0)
    assert (bucket.remaining(0), bucket.reset(0)) == (0, 60)
    assert bucket.wait(1, 0) == pytest.approx(1)
    assert bucket.remaining(10.5) == 10
    bucket.charge(-100, 10.5)
    assert bucket.remaining(10.5) == 60  # never more than full
    bucket.charge(90, 11)
    assert bucket.remaining(11) == 0
    assert bucket.wait(1, 11) == pytest.approx(31)


def test_another_limit_keeps_how_full_it_is() -> None:
    bucket = Bucket(100, 0.0)
    bucket.charge(75, 0)
    bucket.resize(1000, 0)
    assert (bucket.limit, bucket.remaining(0)) == (1000, 250)
    bucket.charge(750, 0)
    bucket.resize(10, 0)
    assert bucket.remaining(0) == 0
    assert bucket.reset(0) == pytest.approx(90)


def test_a_clock_that_stands_still_or_runs_backwards_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.charge(60, 100.0)
    for now in (100.0, 99.0, 50.0):
        assert bucket.remaining(now) == 0
