"""What waits costs what runs nothing: the work of a step and of a request's admission, counted in calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from model.params import SamplingParams
from model.tokenizer import Tokenizer
from scheduler.messages import EngineStats, Started, StepOutput, Submit
from server.daemon import make_service
from server.service import Service
from server.settings import Settings
from server.streams import RequestStream, StreamOptions
from tests.server.fake_engine import READY
from tests.server.running import Running

STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
QUEUED = 2000


def calls(action: Callable[[], Any]) -> int:
    """Of functions, Python's and C's, a generator's every value included."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def opened(service: Service, tokenizer: Tokenizer, prompt_tokens: int) -> RequestStream:
    def stream(id: int) -> RequestStream:
        submit = Submit(id=id, prompt_ids=[5] * prompt_tokens, params=SamplingParams(max_tokens=100, seed=1))
        return RequestStream(submit, tokenizer, StreamOptions(), service.client.abort)

    made = service.client.open(stream)
    service.metrics.live.add(made)
    service.admission.reserve(1)
    return made


def row(id: int, started: bool = False) -> StepOutput:
    begun = [Started(id, 1.0, 0)] if started else []
    return StepOutput(ids=[id], indices=[0], tokens=[1000], finishes=[0], started=begun, stats=STATS, now=2.0)


def work(tokenizer: Tokenizer, queued: int) -> dict[str, int]:
    """Calls that one running stream and one newcomer cost beside so many queued ones."""

    async def count() -> dict[str, int]:
        service = make_service(Settings(max_num_seqs=8, max_queued_requests=5000), ("model",))
        client: Any = service.client
        client.ready.set_result(READY)
        running = opened(service, tokenizer, 3)
        for _ in range(queued):
            opened(service, tokenizer, 3)
        client._deliver(row(running.submit.id, started=True))
        client._deliver(row(running.submit.id))
        return {
            "step": calls(lambda: client._deliver(row(running.submit.id))),
            "check": calls(service.admission.check),
            "check_tokens": calls(lambda: service.admission.check_tokens(10)),
            "open": calls(lambda: opened(service, tokenizer, 3)),
        }

    return asyncio.run(count())


def test_what_waits_costs_nothing(smol: Tokenizer) -> None:
    alone, crowded = work(smol, 0), work(smol, QUEUED)
    assert min(alone.values()) > 0
    few = 10  # a cache of Python's own that is filled in one of the two runs
    assert all(crowded[what] <= alone[what] + few for what in alone), (alone, crowded)


def test_an_event_needs_no_timer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers are for slow clients and quiet streams. uvicorn has one every 0.1 s."""
    timers = 0
    call_at = server.loop.call_at

    def counting(*given: Any, **named: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_at(*given, **named)

    monkeypatch.setattr(server.loop, "call_at", counting)
    chunks = server.stream("/v1/completions", prompt="x", max_tokens=400, ignore_eos=True)
    assert len(chunks) > 200
    assert timers < 100
