from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from model.params import SamplingParams
from model.tokenizer import Tokenizer
from scheduler.messages import Abort, EngineConfig, FinishReason, Started, StepOutput, Submit
from scheduler.wire import frame
from server.detokenizer import Vocabulary
from server.engine_client import EngineClient, EngineFailed
from server.errors import EngineError, Unavailable
from server.streams import RequestStream, StreamOptions
from tests.server.fake_engine import READY, FakeEngine

Test = Callable[[EngineClient, FakeEngine], Coroutine[Any, Any, None]]


def with_engine(test: Test) -> None:
    """Run a test on an event loop, connected to a fake engine that serves."""

    async def connected() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        engine = FakeEngine(theirs)
        thread = threading.Thread(target=engine.run)
        thread.start()
        client = EngineClient()

        async def live() -> None:
            await client.run(ours, EngineConfig())
            client.give_up()

        conversation = asyncio.create_task(live())
        await client.ready
        try:
            await asyncio.wait_for(test(client, engine), 10)
        finally:
            client.close()
            await conversation
            await asyncio.to_thread(thread.join)
            theirs.close()

    asyncio.run(connected())


def opener(client: EngineClient, tokenizer: Vocabulary, **params: Any) -> Callable[[int], RequestStream]:
    def make(id: int) -> RequestStream:
        sampling = SamplingParams(**{"max_tokens": 4, "seed": 1, **params})
        return RequestStream(Submit(id=id, prompt_ids=[5], params=sampling), tokenizer, StreamOptions(), client.abort)

    return make


def test_streams_are_fed_and_forgotten(smol: Tokenizer) -> None:
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        streams = [client.open(opener(client, smol, max_tokens=k)) for k in range(1, 6)]
        assert len({stream.submit.id for stream in streams}) == 5
        results = [await stream.collect() for stream in streams]
        assert [len(result[0].token_ids) for result in results] == [1, 2, 3, 4, 5]
        assert client.live == {}
        assert client.stats is not None
        assert client.stats.running == 0
        assert engine.config == EngineConfig()

    with_engine(test)


def test_one_wake_up_per_stream_and_step(smol: Tokenizer) -> None:
    """However many rows of a request a step brings."""

    async def test(client: EngineClient, engine: FakeEngine) -> None:
        engine.paused.set()
        stream = client.open(opener(client, smol))
        wakes = 0
        wake = stream.wake

        def counting(now: float | None = None) -> None:
            nonlocal wakes
            wakes += 1
            wake(now)

        stream.wake = counting  # type: ignore[method-assign]
        client._deliver(
            StepOutput(
                ids=[stream.submit.id] * 3 + [99],
                indices=[0, 0, 0, 0],
                tokens=[1000, 1001, 1002, 7],
                finishes=[0, 0, FinishReason.LENGTH, 0],
                started=[Started(stream.submit.id, 1.0, 0), Started(99, 1.0, 0)],
                stats=engine.stats(),
                now=2.0,
            )
        )
        assert wakes == 1
        assert stream.done
        assert client.live == {}

    with_engine(test)


def test_aborting_and_failing(smol: Tokenizer) -> None:
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        engine.paused.set()
        left, failed = client.open(opener(client, smol)), client.open(opener(client, smol))
        left.cancel()
        client.fail(failed, EngineError("no"))
        client.fail(failed, EngineError("again"))
        client.abort(12345, None)
        with pytest.raises(EngineError, match="no"):
            await failed.collect()
        await asyncio.to_thread(engine.wait_for, lambda engine: len(engine.aborts()) == 2)
        assert engine.aborts() == [Abort(left.submit.id), Abort(failed.submit.id)]
        assert client.live == {}
        engine.paused.clear()

    with_engine(test)


def test_death_fails_everybody(smol: Tokenizer) -> None:
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        engine.paused.set()
        streams = [client.open(opener(client, smol)) for _ in range(3)]
        engine.die()
        await client.gone.wait()
        for stream in streams:
            with pytest.raises(EngineError):
                await stream.collect()
        assert not client.serving
        assert client.stats is None
        with pytest.raises(Unavailable):
            client.open(opener(client, smol))

    with_engine(test)


class Broken:
    """A vocabulary that fails on every token."""

    strips_leading_space = False
    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        raise IndexError("private")

    def is_special(self, token_id: int) -> bool:
        return False


def test_a_stream_that_cannot_take_its_tokens_fails_alone(smol: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        engine.paused.set()
        before, broken, behind = (client.open(opener(client, text)) for text in (smol, Broken(), smol))
        engine.paused.clear()
        for stream in (before, behind):
            assert len((await stream.collect())[0].token_ids) == 4
        with pytest.raises(EngineError) as caught:
            await broken.collect()
        assert caught.value.code == "internal_error"
        assert "private" not in caught.value.message
        await asyncio.to_thread(engine.wait_for, lambda engine: engine.aborts() == [Abort(broken.submit.id)])
        assert client.serving
        assert client.live == {}

    with_engine(test)
    (record,) = caplog.records
    assert record.exc_info is not None


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\x00\x00\x00\x02\xff\xff", bytes(frame(READY))[:9]])
def test_garbage_is_the_end_of_the_engine(garbage: bytes) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        client = EngineClient()
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        assert await asyncio.wait_for(client.run(ours, EngineConfig()), 5) is None
        client.give_up()
        assert client.gone.is_set()
        with pytest.raises(EngineFailed):
            await client.ready
        theirs.close()

    asyncio.run(test())


def test_silence_counts_only_with_work_pending(smol: Tokenizer) -> None:
    async def test(client: EngineClient, engine: FakeEngine) -> None:
        now = 0.0
        client._clock = lambda: now
        client._heard = 0.0
        engine.paused.set()
        now = 1000.0
        assert not client.stalled
        stream = client.open(opener(client, smol))
        now = 1029.0
        assert not client.stalled
        now = 1031.0
        client._heard = 1000.0
        assert client.stalled
        stream.cancel()
        assert not client.stalled

    with_engine(test)
