"""A key's limits, step by step; the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import InvalidRequest, RateLimited
from server.key_file import ApiKey, digest
from server.lease import ASSUMED_TOKENS, Lease, Limits, duration
from server.ledger import Ledger


class Desk:
    """Where requests with one key arrive."""

    def __init__(self, **limits: Any) -> None:
        self.now = 1000.0
        self.ledger = Ledger()
        self.limits = Limits()
        self.change(**limits)

    def change(self, **limits: Any) -> None:
        self.limits.adopt(ApiKey(name="alice", digest=digest("k"), **limits), self.now)

    def lease(self) -> Lease:
        return Lease(self.limits, self.ledger, lambda: self.now)

    def enter(self) -> Lease:
        lease = self.lease()
        lease.enter()
        return lease

    def left(self, kind: str) -> int:
        """What the headers say is left of requests or tokens."""
        headers = dict(self.limits.headers(self.now))
        return int(headers[f"x-ratelimit-remaining-{kind}".encode()])

    def refused(self, reason: str) -> float:
        """The next request is; seconds that it is told to wait."""
        with pytest.raises(RateLimited) as caught:
            self.enter()
        assert caught.value.status == 429
        assert (caught.value.code, caught.value.reason) == ("rate_limit_exceeded", reason)
        milliseconds = int(caught.value.headers["retry-after-ms"])
        assert int(caught.value.headers["Retry-After"]) >= milliseconds / 1000
        return milliseconds / 1000


def test_requests_a_minute() -> None:
    desk = Desk(requests_per_minute=3)
    for left in (2, 1, 0):
        desk.enter().close()
        assert desk.left("requests") == left
    assert desk.refused("requests_per_minute") == 20
    desk.now += 19.9
    assert desk.refused("requests_per_minute") == pytest.approx(0.1, abs=0.002)
    desk.now += 0.1
    desk.enter().close()


@pytest.mark.parametrize(("status", "left"), [(200, 2), (400, 2), (401, 2), (408, 2), (500, 2), (429, 3), (503, 3)])
def test_what_the_server_refuses_is_no_request(status: int, left: int) -> None:
    desk = Desk(requests_per_minute=3)
    lease = desk.enter()
    lease.answered(status)
    lease.close()
    assert desk.left("requests") == left
    assert desk.ledger.line("alice")["rejected"] == (status == 429)


def test_n_counts_n() -> None:
    desk = Desk(max_concurrency=4)
    first = desk.enter()
    first.widen(3)
    second = desk.enter()
    assert desk.refused("max_concurrency") == 1
    with pytest.raises(RateLimited):
        second.widen(2)
    second.close()
    third = desk.enter()
    third.widen(1)
    first.close()
    first.close()  # idempotent
    fourth = desk.enter()
    fourth.widen(3)
    assert desk.limits.running == 4
    for lease in (third, fourth):
        lease.close()
    assert desk.limits.running == 0


def test_more_sequences_than_a_key_may_ever_have() -> None:
    lease = Desk(max_concurrency=4).enter()
    with pytest.raises(InvalidRequest, match="5 sequences are more than this key may run at once") as caught:
        lease.widen(5)
    assert caught.value.headers["x-should-retry"] == "false"
    assert caught.value.param == "n"


def test_tokens_are_reserved_and_settled() -> None:
    desk = Desk(tokens_per_minute=6000)
    lease = desk.enter()
    lease.reserve(100, 1000, True)
    assert desk.left("tokens") == 4900
    lease.settle(100, 60, 30, False)
    lease.close()
    assert desk.left("tokens") == 5870
    line = desk.ledger.line("alice")
    assert (line["requests"], line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (
        1,
        100,
        60,
        30,
    )


def test_a_request_that_never_ran_gives_its_tokens_back() -> None:
    desk = Desk(tokens_per_minute=6000)
    lease = desk.enter()
    lease.reserve(100, 1000, True)
    lease.close()
    assert desk.left("tokens") == 6000
    assert desk.ledger.names == set()


def test_tokens_that_are_short() -> None:
    desk = Desk(tokens_per_minute=6000)
    first = desk.enter()
    first.reserve(5000, 500, True)
    second = desk.enter()
    with pytest.raises(RateLimited) as caught:
        second.reserve(600, 0, True)
    assert caught.value.headers["retry-after-ms"] == "1000"  # 100 tokens at 100 a second
    second.reserve(600, 0, False)  # let in with its first prompts, and not refused with its later ones
    assert desk.left("tokens") == 0
    assert desk.refused("tokens_per_minute") == pytest.approx(1.01, abs=0.002)  # no body is read in vain


def test_a_long_answer_leaves_a_debt() -> None:
    desk = Desk(tokens_per_minute=6000)
    lease = desk.enter()
    lease.reserve(10, ASSUMED_TOKENS, True)
    lease.settle(10, 0, 9000, False)
    lease.close()
    assert desk.left("tokens") == 0
    assert desk.refused("tokens_per_minute") == pytest.approx((9010 - 6000 + 1) / 100, abs=0.002)


def test_a_prompt_beyond_the_limit_is_not_to_be_retried() -> None:
    desk = Desk(tokens_per_minute=100)
    lease = desk.enter()
    with pytest.raises(InvalidRequest) as caught:
        lease.reserve(101, 0, True)
    assert caught.value.headers["x-should-retry"] == "false"
    assert caught.value.code == "tokens_per_minute_exceeded"
    assert caught.value.numbers == {"prompt_tokens": 101, "tokens_per_minute": 100}
    lease.reserve(100, ASSUMED_TOKENS, True)  # with its answer it has the whole bucket


def test_other_limits_count_from_now_on() -> None:
    desk = Desk(requests_per_minute=2)
    lease = desk.enter()
    desk.change(requests_per_minute=20, tokens_per_minute=100, max_concurrency=1)
    assert (desk.left("requests"), desk.left("tokens")) == (10, 100)
    assert desk.refused("max_concurrency") == 1
    lease.settle(10, 0, 10, False)
    lease.close()
    assert desk.left("tokens") == 80
    desk.change()
    assert desk.limits.headers(desk.now) == []
    desk.enter()


def test_without_a_key_there_is_only_the_ledger() -> None:
    ledger = Ledger()
    lease = Lease(None, ledger)
    lease.enter()
    lease.widen(1000)
    lease.reserve(10**9, 10**9, True)
    lease.settle(5, 0, 7, True)
    assert lease.answered(200) == []
    lease.close()
    line = ledger.line("")
    assert (line["prompt_tokens"], line["completion_tokens"], line["aborted"]) == (5, 7, 1)


ACTS = st.lists(
    st.tuples(
        st.floats(0, 20),
        st.integers(1, 5),
        st.integers(1, 3000),
        st.integers(0, 4000),
        st.sampled_from(["settle", "drop", "later"]),
    ),
    max_size=30,
)


@given(ACTS)
def test_whatever_happens_nothing_leaks(acts: list[tuple[float, int, int, int, str]]) -> None:
    """Concurrency and remaining tokens stay within their limits, and all that was lent comes back."""
    desk = Desk(requests_per_minute=60, tokens_per_minute=5000, max_concurrency=6)
    later: list[tuple[Lease, int, int]] = []
    for seconds, sequences, prompt, answer, end in acts:
        desk.now += seconds
        lease = desk.lease()
        try:
            lease.enter()
            lease.widen(sequences)
            lease.reserve(prompt, sequences * ASSUMED_TOKENS, True)
        except RateLimited:
            lease.answered(429)
            lease.close()
        else:
            lease.answered(200)
            if end == "later":
                later.append((lease, prompt, answer))
                continue
            if end == "settle":
                lease.settle(prompt, 0, answer, False)
            lease.close()
        assert 0 <= desk.limits.running <= 6
        assert 0 <= desk.left("tokens") <= 5000
        assert 0 <= desk.left("requests") <= 60
    for lease, prompt, answer in later:
        lease.settle(prompt, 0, answer, False)
        lease.close()
    assert desk.limits.running == 0
    desk.now += 10_000
    assert (desk.left("tokens"), desk.left("requests")) == (5000, 60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (7.66, "7.66s"),
        (60, "1m0s"),
        (90.951, "1m30.951s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (7262.5, "2h1m2.5s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
