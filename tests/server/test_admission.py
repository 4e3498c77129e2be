from __future__ import annotations

import heapq
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from server.admission import MAX_RETRY_SECONDS, Admission, Rate
from server.errors import InvalidRequest, Overloaded
from tests.server.crowd_bench import CROWD, refused
from tests.server.running import running


class Server:
    """An admission whose clock and engine are the test's."""

    def __init__(self, running: int, queued: int = 0, tokens: int = 10**6) -> None:
        self.now = 0.0
        self.queued = self.computed = 0
        self.admission = Admission(
            running, queued, tokens, lambda: self.queued, lambda: self.computed, lambda: self.now
        )

    def told(self, tokens: int | None = None) -> float:
        """Seconds that a request has to wait, which is refused."""
        with pytest.raises(Overloaded) as caught:
            self.admission.check() if tokens is None else self.admission.check_tokens(tokens)
        seconds, milliseconds = (int(caught.value.headers[name]) for name in ("Retry-After", "retry-after-ms"))
        assert 1 <= milliseconds / 1000 <= seconds <= MAX_RETRY_SECONDS
        assert f"try again in {seconds} s" in caught.value.message
        return milliseconds / 1000

    def work(self, seconds: float, each: float) -> None:
        """Full all the while; a sequence takes `each`."""
        while self.admission.sequences < self.admission.max_running:
            self.admission.reserve(1)
        for _ in range(int(seconds / each)):
            self.now += each
            self.admission.release(1)
            self.admission.reserve(1)


def test_all_sequences_or_none() -> None:
    admission = Admission(2, 3, 100, lambda: 0)
    admission.reserve(4)
    with pytest.raises(Overloaded) as caught:
        admission.reserve(2)
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) >= 1
    assert caught.value.reason == "max_queued_requests"
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
    with pytest.raises(Overloaded) as caught:
        admission.reserve(1)
    assert caught.value.reason == "max_queued_tokens"
    assert admission.sequences == 0


def test_bytes_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.admission.MAX_BODY_BYTES", 100)
    admission = Admission(2, 3, 100, lambda: 0)
    assert admission.hold_bytes(90) == 90
    with pytest.raises(Overloaded) as caught:
        admission.hold_bytes(11)
    assert caught.value.reason == "max_body_bytes"
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


def test_the_wait_follows_the_rate() -> None:
    """A sequence ends every two seconds: who is refused has a place two seconds behind the one before."""
    server = Server(4)
    server.work(100, 2.0)
    waits = [server.told() for _ in range(20)]
    assert waits[:10] == pytest.approx([2 * place for place in range(1, 11)], rel=0.1)
    assert waits[-5:] == [MAX_RETRY_SECONDS] * 5
    server.work(20, 2.0)
    assert server.told() == pytest.approx(12, rel=0.1)
    fast = Server(4)
    fast.work(10, 0.01)
    assert [fast.told() for _ in range(50)] == [1] * 50
    assert fast.told() == 1


def test_a_newer_rate_counts_more() -> None:
    server = Server(4)
    server.work(60, 0.1)
    server.work(240, 6.0)
    assert server.told() == pytest.approx(6, rel=0.2)


def test_quiet_times_say_nothing_of_the_rate() -> None:
    server = Server(4)
    server.work(60, 2.0)
    for _ in range(4):
        server.admission.release(1)
    for _ in range(100):
        server.now += 60
        server.admission.reserve(1)
        server.now += 5
        server.admission.release(1)
    for _ in range(4):
        server.admission.reserve(1)
    assert server.told() == pytest.approx(2, rel=0.15)


def test_before_anything_has_ended() -> None:
    server = Server(4)
    for _ in range(4):
        server.admission.reserve(1)
    assert server.told() == 1
    server.now += 20
    assert server.told() > 15  # nothing has ended in all that time


def test_tokens_wait_as_long_as_they_take() -> None:
    """The engine computes 100 prompt tokens a second, and 40 too many would wait."""
    server = Server(4, 100, 1000)
    server.admission.reserve(1)
    server.queued = 990
    for _ in range(100):
        server.now += 1
        server.computed += 100
        server.admission.reserve(1)
        server.admission.release(1)
    assert server.told(tokens=410) == pytest.approx(4, rel=0.1)
    assert server.told(tokens=210) == pytest.approx(6, rel=0.1)


def test_counters_that_begin_anew_are_no_negative_rate() -> None:
    server = Server(4, 100, 1000)
    server.queued, server.computed = 990, 10**6
    for computed in (10**6, 0, 100):
        server.computed = computed
        server.now += 1
        server.admission.reserve(1)
        server.admission.release(1)
    assert 1 <= server.told(tokens=100) <= MAX_RETRY_SECONDS


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 64)), max_size=30), st.integers(1, 64))
def test_a_rate_is_never_absurd(seen: list[tuple[float, int]], running: int) -> None:
    rate = Rate(1.0, 1.0 / running)
    for number, (seconds, count) in enumerate(seen, 1):
        rate.see(count, seconds)
        assert 0 < rate.per_second <= (1 + sum(ended for _, ended in seen[:number])) * running


def test_a_crowd_comes_back_one_by_one() -> None:
    """A hundred clients at once, four at a time, two seconds each: who comes back when told finds room after a few
    tries, and the server is never idle for long."""
    server, tries = Server(4), 0
    order = itertools.count()
    events: list[tuple[float, int, bool]] = [(0.0, next(order), False) for _ in range(100)]
    while events:
        server.now, _, ends = heapq.heappop(events)
        if ends:
            server.admission.release(1)
            continue
        tries += 1
        try:
            server.admission.reserve(1)
        except Overloaded as error:
            back = server.now + int(error.headers["retry-after-ms"]) / 1000
            heapq.heappush(events, (back, next(order), False))
        else:
            heapq.heappush(events, (server.now + 2.0, next(order), True))
    assert server.admission.requests == 0
    assert server.now < 50 * 1.4  # 50 s of work
    assert tries < 100 * 5


def test_five_hundred_at_once_are_refused_at_once(smol: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read of a body, nothing tokenised. What each refusal costs is the benchmark's to say."""
    tokenised: list[Any] = []
    monkeypatch.setattr("server.prompts.PromptBuilder.chat", lambda *given, **named: tokenised.append(given))
    with running(smol, max_num_seqs=1, max_queued_requests=0) as server:
        answers = refused(server)
        assert {answer.status for answer in answers} == {b"HTTP/1.1 429 Too Many Requests"}
        assert all(b"retry-after-ms: " in answer.head and b"retry-after: " in answer.head for answer in answers)
        assert server.metric("octavo_rejected_total", reason="max_queued_requests") == CROWD
    assert tokenised == []
