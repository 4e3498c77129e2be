"""Gaps on known times."""

from __future__ import annotations

from loadtest.interference import measure
from loadtest.outcome import Failure, Outcome


def stream(arrivals: list[float]) -> Outcome:
    return Outcome(0.0, 0.0, 4, arrivals=arrivals, end=arrivals[-1])


def long(sent: float, first: float) -> Outcome:
    return Outcome(sent, sent, 6000, arrivals=[first], end=first)


def test_worst_and_usual_gap_of_each_stream() -> None:
    even = stream([1.0, 1.1, 1.2, 1.3, 1.55, 1.8, 1.9, 2.0])
    late = stream([1.0, 1.2, 1.4, 1.6, 1.9, 2.6])
    found = measure([even, late], long(1.35, 1.85))
    assert found is not None
    assert [round(gap, 6) for gap in found.usual] == [0.1, 0.2]
    assert [round(gap, 6) for gap in found.worst] == [0.25, 0.3]
    assert round(found.ratio, 6) == 2.5
    assert "2.50" in found.lines()


def test_a_stream_s_own_prefill_is_no_gap() -> None:
    """Only what came after the last stream's first content counts as usual."""
    early = stream([0.1, 0.9, 1.7, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    other = stream([2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    found = measure([early, other], long(2.75, 2.95))
    assert found is not None
    assert [round(gap, 6) for gap in found.usual] == [0.1, 0.1]


def test_nothing_is_said_where_something_is_missing() -> None:
    short = stream([1.0, 1.1, 1.2, 1.3])
    assert measure([short], long(1.25, 2.0)) is None, "the stream ended first"
    failed = long(1.25, 1.28)
    failed.failure = Failure("HTTP 429", "busy")
    assert measure([short], failed) is None
