"""The supervisor, over engines that are threads: who follows whom, when, and what becomes of requests meanwhile."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest

from model.tokenizer import Tokenizer
from scheduler.config import EngineConfig
from scheduler.messages import EngineStats, Ready
from server.drain import until
from server.engine_client import EngineClient
from server.engine_process import EngineProcess
from server.errors import DeadlineExceeded, EngineError
from server.supervisor import Supervisor
from tests.server.fake_engine import READY, FakeEngine
from tests.server.fake_process import FakeProcess
from tests.server.running import running
from tests.server.test_engine_client import opener

Prepare = Callable[[FakeEngine], None]


def nothing(engine: FakeEngine) -> None:
    """An engine as it is."""


def paused(engine: FakeEngine) -> None:
    """Takes requests, and computes nothing."""
    engine.paused.set()


def slow(engine: FakeEngine) -> None:
    """Takes a while to load."""
    engine.load_seconds = 0.5


@dataclass
class House:
    """A client, its supervisor, and all processes there have been."""

    client: EngineClient
    script: list[Prepare | OSError]
    """What becomes of each process; the last one of all that follow."""
    processes: list[FakeProcess] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)

    def spawn(self) -> EngineProcess:
        entry = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        if isinstance(entry, OSError):
            raise entry
        self.processes.append(FakeProcess(entry))
        return cast(EngineProcess, self.processes[-1])

    @property
    def engine(self) -> FakeEngine:
        return self.processes[-1].engine

    async def wait(self, condition: Callable[[], bool]) -> None:
        assert await until(condition, 5), "never came true"

    async def serves(self, number: int) -> None:
        """The process of that number, counted from 1."""
        await self.wait(lambda: len(self.processes) == number and self.client.serving)


@asynccontextmanager
async def house(
    *script: Prepare | OSError, most: int = 5, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[House]:
    """Its first engine serves. The watchdog looks every 10 ms, and knows no time but the clock's."""
    it = House(EngineClient(patience=0.1, clock=clock), list(script))
    supervisor = Supervisor(it.client, EngineConfig(), it.spawn(), it.spawn, most, it.restarts)
    supervisor.start()
    await it.client.ready
    try:
        yield it
    finally:
        await supervisor.stop()


def pauses(records: Sequence[logging.LogRecord]) -> list[float]:
    """Before each restart, as it was announced."""
    return [record.args[2] for record in records if "another starts in" in record.msg]  # type: ignore[index,misc]


async def test_each_pause_is_twice_as_long_up_to_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deaths without progress, until there were too many."""
    monkeypatch.setattr("server.supervisor.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("server.supervisor.MAX_PAUSE", 0.035)
    async with house(nothing, most=5) as it:
        for number in range(1, 7):
            await it.serves(number)
            it.processes[-1].die(-signal.SIGKILL)
        await it.client.gone.wait()
        assert pauses(caplog.records) == [0, 0.01, 0.02, 0.035, 0.035]
        assert it.restarts == {"killed": 5}


async def test_progress_makes_it_begin_anew(
    smol: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.supervisor.FIRST_PAUSE", 0.01)
    async with house(nothing, most=2) as it:
        for number in range(1, 6):
            await it.serves(number)
            await it.client.open(opener(it.client, smol)).collect()
            it.processes[-1].die(1)
        await it.serves(6)
        assert pauses(caplog.records) == [0] * 5
        assert it.restarts == {"failed": 5}


async def test_no_process_can_be_made(
    smol: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of memory, or of processes: it is tried again, and the request that waits goes on."""
    monkeypatch.setattr("server.supervisor.FIRST_PAUSE", 0.01)
    full = OSError(11, "Resource temporarily unavailable")
    async with house(paused, full, full, nothing) as it:
        stream = it.client.open(opener(it.client, smol))
        it.processes[0].die(-signal.SIGKILL)
        assert len((await stream.collect())[0].token_ids) == 4
        assert it.restarts == {"killed": 1, "unready": 2}
    assert "no process can be made: Resource temporarily unavailable" in caplog.text


async def test_where_none_can_ever_be_made_it_ends(smol: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.supervisor.FIRST_PAUSE", 0.001)
    async with house(paused, OSError(12, "Cannot allocate memory"), most=3) as it:
        stream = it.client.open(opener(it.client, smol))
        it.processes[0].die(1)
        with pytest.raises(EngineError):
            await stream.collect()
        assert it.client.gone.is_set()
        assert it.restarts.total() == 3


async def test_a_slow_load_is_no_hang(smol: Tokenizer) -> None:
    """However much waits: the watchdog's time is for an engine that serves."""
    now = 0.0
    async with house(paused, slow, clock=lambda: now) as it:
        stream = it.client.open(opener(it.client, smol))
        it.processes[0].die(-signal.SIGKILL)
        await it.wait(lambda: len(it.processes) == 2)
        now = 1000.0
        assert len((await stream.collect())[0].token_ids) == 4
        assert it.restarts == {"killed": 1}
        assert it.processes[1].stacks == 0


async def test_a_load_without_an_end_is_ended(smol: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.supervisor.LOAD_SECONDS", 0.25)
    monkeypatch.setattr("server.supervisor.SLOW_LOADS", 0)
    monkeypatch.setattr("server.supervisor.STACK_SECONDS", 0.01)
    async with house(paused, slow, nothing) as it:
        stream = it.client.open(opener(it.client, smol))
        it.processes[0].die(-signal.SIGKILL)
        assert len((await stream.collect())[0].token_ids) == 4
        assert it.restarts == {"killed": 1, "hung": 1}
        assert it.processes[1].stacks == 1


async def test_who_left_or_was_late_during_the_pause_is_not_sent_again(smol: Tokenizer) -> None:
    """And the others are, once, with what their clients have."""
    async with house(nothing, slow) as it:
        it.engine.interval = 0.02
        left, late, stays = (it.client.open(opener(it.client, smol, max_tokens=40)) for _ in range(3))
        await it.wait(lambda: all(stream.tokens[0] for stream in (left, late, stays)))
        it.processes[0].die(-signal.SIGKILL)
        await it.wait(lambda: not it.client.serving)
        had = len(stays.tokens[0])
        assert 0 < had < 40
        left.cancel()
        it.client.fail(late, DeadlineExceeded("too late"))
        with pytest.raises(DeadlineExceeded):
            await late.collect()
        new = it.client.open(opener(it.client, smol))
        assert len((await stays.collect())[0].token_ids) == 40
        assert len((await new.collect())[0].token_ids) == 4
        sent = {submit.id: submit.generated for submit in it.engine.submits()}
        assert sent == {stays.submit.id: [stays.tokens[0][:had]], new.submit.id: []}
        assert it.engine.aborts() == []
        assert it.client.queued_tokens == 0


async def test_the_next_engine_may_hold_less(smol: Tokenizer) -> None:
    """Whoever has to know is told before anything is sent to it."""
    small = msgspec.structs.replace(READY, max_model_len=64, num_blocks=10)

    def shrunk(engine: FakeEngine) -> None:
        engine.ready = small

    async with house(paused, shrunk) as it:
        told: list[tuple[Ready, int]] = []
        it.client.on_return = lambda ready: told.append((ready, len(it.engine.submits())))
        stream = it.client.open(opener(it.client, smol))
        it.processes[0].die(-signal.SIGKILL)
        await stream.collect()
        assert told == [(small, 0)]


def test_what_no_longer_fits_is_refused_with_the_new_numbers(smol: Tokenizer) -> None:
    with running(smol) as server:
        assert server.complete(prompt=[5] * 100).status_code == 200
        small = msgspec.structs.replace(READY, max_model_len=64, num_blocks=2)
        server.call(lambda: server.service.client.on_return(small))
        for tokens, number in ((100, 64), (40, 2)):
            refused = server.complete(prompt=[5] * tokens)
            assert refused.status_code == 400
            assert f" {number}" in refused.json()["error"]["message"]
        assert server.complete(prompt=[5] * 20).status_code == 200
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64


async def test_a_dismissed_engine_is_no_death(smol: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """It is not counted, none follows until one is called for, and that one counts its pause from then on."""
    now = 0.0
    it = House(EngineClient(clock=lambda: now), [nothing])
    supervisor = Supervisor(it.client, EngineConfig(), it.spawn(), it.spawn, 0, it.restarts)
    supervisor.start()
    await it.client.ready
    await it.client.open(opener(it.client, smol)).collect()
    await supervisor.dismiss()
    assert not it.client.serving
    assert it.client.coming
    assert len(it.processes) == 1
    now = 1000.0
    assert it.client.down_seconds == 1000
    it.client.expect()
    assert it.client.down_seconds == 0
    supervisor.call()
    await it.serves(2)
    await it.client.open(opener(it.client, smol)).collect()
    assert it.restarts.total() == 0
    assert pauses(caplog.records) == []
    await supervisor.stop()
    await supervisor.dismiss()  # there is nobody to wait for


OF_THE_MOMENT = {
    *("running", "waiting", "waiting_tokens", "blocks_total", "blocks_free", "blocks_cached", "blocks_active"),
    *("tokens_active", "step_seconds", "step_tokens", "step_rows"),
}


async def test_what_counts_goes_on_counting_and_what_does_not_is_the_moment_s(smol: Tokenizer) -> None:
    async with house(nothing) as it:
        await it.client.open(opener(it.client, smol)).collect()
        first = it.client.counters
        assert first is not None
        it.processes[0].die(-signal.SIGKILL)
        await it.serves(2)
        assert it.client.counters == first
        await it.client.open(opener(it.client, smol)).collect()
        assert it.client.stats is not None
        assert it.client.counters is not None
        for name in EngineStats.__struct_fields__:
            now = getattr(it.client.stats, name)
            before = 0 if name in OF_THE_MOMENT else getattr(first, name)
            assert getattr(it.client.counters, name) == before + now, name
        assert first.steps > 0
