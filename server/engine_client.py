"""The API process's end of the socket to the engine: submit, abort, and one reader that hands out each step.

    routes ── open() ──▶ Submit ──▶ socket ──▶ engine
    streams ◀─ feed(), one wake() ◀─ rows of a StepOutput ◀─ socket

Everything here runs on the event loop's thread. A stream leaves `live` when nothing more is expected of the engine for
it: it is done, it was aborted, it failed, or the engine is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable

from scheduler.messages import (
    Abort,
    EngineConfig,
    EngineStats,
    Failed,
    FromEngine,
    Progress,
    Ready,
    StepOutput,
    ToEngine,
)
from scheduler.wire import WireError, frame, from_engine_frames
from server.errors import EngineError, RequestError, Unavailable, internal_error
from server.streams import RequestStream

log = logging.getLogger("octavo.engine")

READ_BYTES = 1 << 16
STALL_SECONDS = 30.0
"""With work pending, an engine that says nothing for so long is hung."""
ENGINE_GONE = "The engine stopped while it worked on this request."


class EngineFailed(Exception):
    """The engine could not start, for a reason that one line tells."""


class EngineClient:
    """One engine process, as the API process sees it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.live: dict[int, RequestStream] = {}
        self.queued_tokens = 0
        """Prompt tokens of requests that the engine has not started. Counted, not summed: thousands may wait."""
        self.stats: EngineStats | None = None
        """As of the last step; None before the first one, and once the engine is gone."""
        self.counters: EngineStats | None = None
        """The same, kept when the engine is gone: counters must not fall."""
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """Set when the engine serves; EngineFailed when it never will."""
        self.gone = asyncio.Event()
        """The connection has ended, for whatever reason."""
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_step: Callable[[StepOutput], None] = lambda step: None
        self.on_gap: Callable[[float], None] = lambda seconds: None
        """Told the time between two steps that brought tokens of the same request."""
        self._clock = clock
        self._ids = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0

    @property
    def serving(self) -> bool:
        return self.ready.done() and not self.gone.is_set() and self.ready.exception() is None

    @property
    def stalled(self) -> bool:
        """Whether work is pending and the engine has been silent for too long."""
        return bool(self.live) and self._clock() - self._heard > STALL_SECONDS

    async def run(self, sock: socket.socket, config: EngineConfig) -> None:
        """Tell the engine its configuration, then read until it closes the connection. Never raises for its death."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        try:
            self._writer.write(frame(config))
            frames = from_engine_frames()
            while data := await reader.read(READ_BYTES):
                for message in frames.feed(data):
                    self._receive(message)
        except ConnectionError:
            pass
        except WireError:
            log.exception("the engine sent what is no message")
        finally:
            self._end()

    def open(self, submit: Callable[[int], RequestStream]) -> RequestStream:
        """Make a stream with a fresh id and send its request. Raises Unavailable without an engine."""
        if not self.serving:
            raise Unavailable("The engine is not running.")
        stream = submit(next(self._ids))
        if not self.live:
            self._heard = self._clock()  # silence before there was work does not count
        self.live[stream.submit.id] = stream
        self.queued_tokens += stream.usage.prompt_tokens
        self._send(stream.submit)
        return stream

    def abort(self, id: int, index: int | None) -> None:
        """End a request, or one sequence of it, in the engine. Streams call it."""
        if stream := self.live.get(id):
            self._send(Abort(id, index))
            if index is None:
                self._forget(stream)

    def fail(self, stream: RequestStream, error: RequestError) -> None:
        """End a request in the engine, and tell its reader why. Does nothing where it already ended."""
        if stream.submit.id in self.live:
            self.abort(stream.submit.id, None)
            stream.fail(error)

    def close(self) -> None:
        """Hang up: the engine process ends itself. What it has not read yet is not worth waiting for."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self.gone.is_set():
            self._writer.write(frame(message))

    def _receive(self, message: FromEngine) -> None:
        self._heard = self._clock()
        match message:
            case StepOutput():
                self._deliver(message)
            case Progress():
                self.on_progress(message)
            case Ready():
                self.ready.set_result(message)
            case Failed():
                self.ready.set_exception(EngineFailed(message.message))

    def _deliver(self, step: StepOutput) -> None:
        live = self.live
        touched: dict[int, RequestStream] = {}
        self.stats = self.counters = step.stats
        for started in step.started:
            if stream := live.get(started.id):
                if stream.timings.scheduled is None:
                    self.queued_tokens -= stream.usage.prompt_tokens
                stream.started(started)
        for values in step.prompt_logprobs:
            if stream := live.get(values.id):
                try:
                    stream.prompt_logprobs(values.values)
                except Exception:
                    self._broken(stream)
        for pooled in step.pooled:
            if stream := live.get(pooled.id):
                stream.vector = pooled.vector
        logprobs = step.logprobs
        messages = {error.row: error.message for error in step.errors}
        for row, (id, index, token, finish) in enumerate(
            zip(step.ids, step.indices, step.tokens, step.finishes, strict=True)
        ):
            stream = live.get(id)
            if stream is None:
                continue  # it crossed an abort
            touched[id] = stream
            try:
                stream.feed(index, token, finish, logprobs.get(row), messages.get(row))
            except Exception:
                self._broken(stream)
        for stream in touched.values():
            previous = stream.timings.last_token
            stream.wake(step.now)
            if previous is not None and stream.timings.last_token == step.now:
                self.on_gap(step.now - previous)
            if stream.done:
                self._forget(stream)
        self.on_step(step)

    def _broken(self, stream: RequestStream) -> None:
        """It could not take what was for it. That ends this request and no other."""
        log.exception("request %d failed on what the engine sent for it", stream.submit.id)
        self.fail(stream, internal_error())

    def _forget(self, stream: RequestStream) -> None:
        """Nothing more is expected for it. Does nothing the second time."""
        if self.live.pop(stream.submit.id, None) is not None and stream.timings.scheduled is None:
            self.queued_tokens -= stream.usage.prompt_tokens

    def _end(self) -> None:
        self.gone.set()
        self.stats = None
        if not self.ready.done():
            self.ready.set_exception(EngineFailed("the engine process ended before it was ready"))
        self.ready.exception()  # mark as retrieved: whoever waits for it still gets it
        for stream in list(self.live.values()):
            stream.fail(EngineError(ENGINE_GONE))
        self.live.clear()
        self.queued_tokens = 0
        self.close()
