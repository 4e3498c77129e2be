"""Gaps on known times."""

from __future__ import annotations

from math import inf

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
    assert [round(gap, 6) for gap in found.usual] == [0.1, 0.2]
    assert [round(gap, 6) for gap in found.worst] == [0.25, 0.3]
    assert round(found.ratio, 6) == 2.5
    assert found.warning is None
    assert "WARNING" not in found.lines()
    fields = {key: round(value, 6) if isinstance(value, float) else value for key, value in found.fields().items()}
    assert fields == {
        "interference_streams": 2,
        "interference_streams_measured": 2,
        "interference_streams_ended": 0,
        "interference_streams_late": 0,
        "interference_usual_gap_ms": 150.0,
        "interference_worst_gap_ms": 300.0,
        "interference_worst_gap_ratio": 2.5,
        "interference_long_prompt_len": 6000,
        "interference_long_prompt_ttft_ms": 500.0,
        "interference_warning": None,
    }


def test_a_character_of_several_tokens_is_no_wait() -> None:
    """Where the server names the tokens, each ends a gap, though only the last of a character brings text."""
    text = stream([1.0, 1.1, 1.2, 1.3, 1.9])
    text.beats = [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9]
    found = measure([text], long(1.25, 1.85))
    assert [round(gap, 6) for gap in found.worst] == [0.2]


def test_a_stream_s_own_prefill_is_no_gap() -> None:
    """Only what came after the last stream's first content counts as usual."""
    early = stream([0.1, 0.9, 1.7, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    other = stream([2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    found = measure([early, other], long(2.75, 2.95))
    assert [round(gap, 6) for gap in found.usual] == [0.1, 0.1]


def test_pieces_that_come_several_at_once() -> None:
    found = measure([stream([1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 2.1])], long(1.25, 2.0))
    assert found.usual == [0.0]
    assert found.fields()["interference_worst_gap_ratio"] == inf
    assert "inf" in found.lines()


def test_only_streams_that_ran_throughout_are_measured_and_the_others_are_named() -> None:
    """One was still in its prefill when the long prompt came, one ended beside it, one failed."""
    throughout = stream([1.0, 1.1, 1.2, 1.5, 2.1])
    late = stream([1.5, 1.9, 2.1])
    ended = stream([1.0, 1.1, 1.2, 1.9])
    failed = stream([1.0, 1.1, 1.2, 2.3])
    failed.failure = Failure("HTTP 500", "died")
    found = measure([throughout, late, ended, failed], long(1.25, 2.0))
    assert [round(gap, 6) for gap in found.usual] == [0.1]
    assert [round(gap, 6) for gap in found.worst] == [0.6]
    warning = (
        "1 of 4 streams ran beside the long prompt: 1 ended before its first token (raise --random-output-len), "
        "1 had no usual gap yet (lower --max-concurrency or --random-input-len), 1 failed"
    )
    assert found.fields()["interference_warning"] == warning
    assert found.lines().endswith(f"WARNING: {warning}")


def test_nothing_is_said_where_nothing_was_measured() -> None:
    short = stream([1.0, 1.1, 1.2, 1.3])
    found = measure([short], long(1.25, 2.0))
    assert found.fields()["interference_worst_gap_ratio"] is None
    assert "0 of 1 streams ran beside the long prompt: 1 ended" in found.lines()
    assert "gap" not in found.lines()
    failed = long(1.25, 1.28)
    failed.failure = Failure("HTTP 429", "busy")
    found = measure([short], failed)
    assert (found.warning, found.worst) == ("the long prompt failed: nothing is measured", [])
    assert found.fields()["interference_long_prompt_ttft_ms"] is None
