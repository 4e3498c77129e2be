from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.admission import MAX_RETRY_SECONDS, Admission
from server.errors import InvalidRequest, Overloaded


def test_all_sequences_or_none() -> None:
    admission = Admission(2, 3, 100, lambda: 0)
    admission.reserve(4)
    with pytest.raises(Overloaded) as caught:
        admission.reserve(2)
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) >= 1
    assert admission.rejected["max_queued_requests"] == 1
    admission.reserve(1)
    admission.release(4)
    admission.reserve(4)
    assert (admission.sequences, admission.requests) == (5, 2)


def test_what_could_never_fit_is_no_overload() -> None:
    with pytest.raises(InvalidRequest, match="n: 6 sequences"):
        Admission(2, 3, 100, lambda: 0).reserve(6)


def test_waiting_tokens() -> None:
    queued = 0
    admission = Admission(2, 100, 50, lambda: queued)
    admission.check_tokens(1000)  # nothing waits: it may be as long as the context allows
    queued = 20
    admission.check_tokens(30)
    with pytest.raises(Overloaded):
        admission.check_tokens(31)
    queued = 50
    with pytest.raises(Overloaded):
        admission.reserve(1)
    assert admission.rejected["max_queued_tokens"] == 2
    assert admission.sequences == 0


def test_bytes_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.admission.MAX_BODY_BYTES", 100)
    admission = Admission(2, 3, 100, lambda: 0)
    assert admission.hold_bytes(90) == 90
    with pytest.raises(Overloaded):
        admission.hold_bytes(11)
    assert admission.rejected["max_body_bytes"] == 1
    admission.hold_bytes(10)
    admission.free_bytes(90)
    assert admission.body_bytes == 10


@given(st.lists(st.one_of(st.integers(1, 6), st.none())), st.integers(1, 4), st.integers(0, 8))
def test_never_above_the_limit(operations: list[int | None], running: int, queued: int) -> None:
    """An integer asks for so many slots, None gives the oldest back."""
    admission = Admission(running, queued, 100, lambda: 0)
    held: list[int] = []
    for operation in operations:
        if operation is None:
            if held:
                admission.release(held.pop(0))
            continue
        if operation > running + queued:
            continue
        if sum(held) + operation <= running + queued:
            admission.reserve(operation)
            held.append(operation)
        else:
            with pytest.raises(Overloaded) as refusal:
                admission.reserve(operation)
            assert 1 <= int(refusal.value.headers["Retry-After"]) <= MAX_RETRY_SECONDS
        assert (admission.sequences, admission.requests) == (sum(held), len(held))
