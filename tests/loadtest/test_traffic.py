"""Closed and open loops, with senders that end when the test says so."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.client import clock
from loadtest.outcome import Outcome
from loadtest.traffic import closed_loop, open_loop
from loadtest.workloads import Prompt

PROMPTS = [Prompt([n], 1, 1) for n in range(12)]


def number(prompt: Prompt) -> int:
    assert isinstance(prompt.content, list)
    return prompt.content[0]


class Sender:
    """Records what is sent, and who is in flight."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.due: dict[int, float] = {}

    async def __call__(self, prompt: Prompt, scheduled: float) -> Outcome:
        self.now += 1
        self.most = max(self.most, self.now)
        self.due[number(prompt)] = scheduled
        outcome = Outcome(scheduled, clock(), number(prompt))
        await self.work(number(prompt))
        outcome.end = clock()
        self.now -= 1
        return outcome

    async def work(self, who: int) -> None:
        for _ in range(1 + who % 5):
            await asyncio.sleep(0)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (4, 4), (100, 12)])
def test_closed_loop_keeps_its_concurrency(concurrency: int, most: int) -> None:
    send, done = Sender(), list[Outcome]()
    outcomes = asyncio.run(closed_loop(send, PROMPTS, concurrency, done.append))
    assert [o.input_tokens for o in outcomes] == list(range(12)), "in the order of the prompts"
    assert sorted(o.input_tokens for o in done) == list(range(12))
    assert send.most == most
    assert all(o.sent - o.scheduled < 0.5 for o in outcomes), "timed from when it was sent"


def test_open_loop_waits_for_nobody() -> None:
    """The first answer comes only after the last request was sent; each counts from its own place in the schedule."""
    offsets = [0.004 * n for n in range(12)]

    class Patient(Sender):
        async def work(self, who: int) -> None:
            if who == 11:
                all_sent.set()
            await all_sent.wait()

    async def run() -> list[Outcome]:
        return await open_loop(send, PROMPTS, offsets, None, lambda outcome: None)

    all_sent = asyncio.Event()
    send = Patient()
    outcomes = asyncio.run(run())
    assert send.most == 12
    due = [o.scheduled - outcomes[0].scheduled for o in outcomes]
    assert due == pytest.approx(offsets, abs=1e-9), "exactly the schedule, however late this client was"
    assert all(o.sent >= o.scheduled for o in outcomes)


def test_late_sends_count_as_latency() -> None:
    """All are due at once but one is sent at a time: the last waits for all others, and its latency says so."""

    class Slow(Sender):
        async def work(self, who: int) -> None:
            await asyncio.sleep(0.01)

    send = Slow()
    outcomes = asyncio.run(open_loop(send, PROMPTS, [0.0] * 12, 1, lambda outcome: None))
    assert send.most == 1
    assert [o.e2el >= 0.0099 * (n + 1) for n, o in enumerate(outcomes)] == [True] * 12
    assert outcomes[11].sent - outcomes[11].scheduled >= 0.0099 * 11
