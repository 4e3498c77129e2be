"""The API process's end of the socket to the engine: submit, abort, and one reader that hands out each step.

    routes ── open() ──▶ line ──▶ Submit ──▶ socket ──▶ engine
    streams ◀─ feed(), one wake() ◀─ rows of a StepOutput ◀─ socket

Engines come and go, the client stays. While there is none, requests wait in the line (`probation`); to the next one
they are sent with the tokens that their clients have. Everything here runs on the event loop's thread. A stream leaves
`live` when nothing more is expected of any engine for it: it is done, it was aborted, it failed, or none is coming.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable

import msgspec

from scheduler.messages import (
    COUNTERS,
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
from server.probation import Probation
from server.streams import RequestStream

log = logging.getLogger("octavo.engine")

READ_BYTES = 1 << 16
WATCHDOG_SECONDS = 30.0
SLOW_STEPS = 10
"""An engine may be silent for as long as so many steps like its last one: where that is slow, all is."""
ENGINE_GONE = "The engine stopped while it worked on this request."
GUILTY = "The engine stopped again and again while it worked on this request."
NOT_AGAIN = {"x-should-retry": "false"}


class EngineFailed(Exception):
    """The engine could not start, for a reason that one line tells."""


class EngineClient:
    """The engine, as the API process sees it."""

    def __init__(
        self,
        width: int = 64,
        patience: float = WATCHDOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`width`: requests that run at once. `patience`: with work pending, an engine silent for so long is hung."""
        self.live: dict[int, RequestStream] = {}
        self.queued_tokens = 0
        """Prompt tokens of requests that the engine has not started. Counted, not summed: thousands may wait."""
        self.stats: EngineStats | None = None
        """As of the last step; None before the first one, and while there is no engine."""
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """Set when the first engine serves; EngineFailed when it never will."""
        self.gone = asyncio.Event()
        """There is no engine, and none is coming."""
        self.advanced = False
        """This engine has brought a token or an end."""
        self.patience = patience
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_step: Callable[[StepOutput], None] = lambda step: None
        self.on_gap: Callable[[float], None] = lambda seconds: None
        """Told the time between two steps that brought tokens of the same request."""
        self.on_return: Callable[[Ready], None] = lambda ready: None
        """Told what an engine is like that took the place of another."""
        self._clock = clock
        self._ids = itertools.count(1)
        self._probation = Probation(width)
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0
        self._up = 0.0
        """When this engine was ready."""
        self._down: float | None = None
        """Since when there has been no engine, where there was one."""
        self._past: EngineStats | None = None
        """Counters of all engines before this one."""

    @property
    def coming(self) -> bool:
        """There is an engine, or after a pause there will be: requests may be made."""
        return self.ready.done() and self.ready.exception() is None and not self.gone.is_set()

    @property
    def serving(self) -> bool:
        """There is one now."""
        return self._down is None and self.coming

    @property
    def stalled(self) -> bool:
        """Whether work is pending and the engine has been silent for too long."""
        if not self.serving or len(self.live) == len(self._probation):
            return False
        last = self.stats.step_seconds if self.stats is not None else 0.0
        return self._clock() - self._heard > max(self.patience, SLOW_STEPS * last)

    @property
    def down_seconds(self) -> float:
        """How long there has been no engine."""
        return 0.0 if self._down is None else self._clock() - self._down

    @property
    def held(self) -> int:
        """Sequences that wait here for an engine, or for their turn in it."""
        waiting = self._probation.line if self.serving else self.live
        return sum(self.live[id].submit.n for id in waiting)

    @property
    def counters(self) -> EngineStats | None:
        """COUNTERS of all engines so far: they must not fall. What is of the moment is in `stats`."""
        if self._past is None or self.stats is None:
            return self.stats or self._past
        past, now = self._past, self.stats
        return msgspec.structs.replace(now, **{name: getattr(past, name) + getattr(now, name) for name in COUNTERS})

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that all engines have computed, as in `counters`; asked at the end of every request."""
        return sum(stats.computed_tokens for stats in (self._past, self.stats) if stats is not None)

    async def run(self, sock: socket.socket, config: EngineConfig) -> float | None:
        """An engine's life: tell it its configuration, then read until it closes the connection. Never raises for its
        death. How many seconds it served; None where it never did.

        Then `bury` it, where it served, and run the next one or `give_up`."""
        self.advanced = False
        seconds = None
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
            if self.serving:
                self._down = self._clock()
                seconds = self._down - self._up
            self._past, self.stats = self.counters, None
            self.close()
        return seconds

    def bury(self, outside: bool) -> None:
        """An engine that served is dead; `outside`: perhaps by no fault of its own. Whoever killed it fails, as far as
        that is certain."""
        guilty = self._probation.end(self.live, outside)
        if guilty is not None:
            log.error("request %d was alone with an engine that died, again: it fails", guilty)
            self.fail(self.live[guilty], EngineError(GUILTY, headers=NOT_AGAIN))

    def give_up(self) -> None:
        """No engine is coming: whoever waits for one is told. May be called again."""
        self.gone.set()
        if not self.ready.done():
            self.ready.set_exception(EngineFailed("the engine process ended before it was ready"))
        self.ready.exception()  # mark as retrieved: whoever waits for it still gets it
        for stream in list(self.live.values()):
            self._forget(stream)
            stream.fail(EngineError(ENGINE_GONE))

    def open(self, submit: Callable[[int], RequestStream]) -> RequestStream:
        """Make a stream with a fresh id, and send its request now or when its turn comes. Raises Unavailable where no
        engine is coming, or the first one is not ready."""
        if not self.coming:
            raise Unavailable("The engine is not running.")
        stream = submit(next(self._ids))
        if not self.live:
            self._heard = self._clock()  # silence before there was work does not count
        self.live[stream.submit.id] = stream
        self.queued_tokens += stream.usage.prompt_tokens
        self._probation.add(stream.submit.id)
        self._pump()
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

    def excuse(self, seconds: float) -> None:
        """This process itself stood still for so long: the engine may have spoken all the time."""
        self._heard += seconds

    def expect(self) -> None:
        """Another engine is wanted from now on: until here nobody waited for one."""
        self._down = self._clock()

    def close(self) -> None:
        """Hang up: the engine process ends itself. What it has not read yet is not worth waiting for."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _pump(self) -> None:
        """Send whose turn it is."""
        if self.serving:
            for id in self._probation.next(self._clock(), self._heard):
                self._send(self.live[id].resubmit())

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and self.serving:
            self._writer.write(frame(message))

    def _receive(self, message: FromEngine) -> None:
        self._heard = self._clock()
        match message:
            case StepOutput():
                self._deliver(message)
            case Progress():
                self.on_progress(message)
            case Ready():
                self._begin(message)
            case Failed():
                if self.ready.done():
                    log.error("the engine cannot start again: %s", message.message)
                else:
                    self.ready.set_exception(EngineFailed(message.message))

    def _begin(self, ready: Ready) -> None:
        self._up = self._heard
        if not self.ready.done():
            self.ready.set_result(ready)
            return
        log.warning("the engine serves again after %.1f s; %d requests go on", self.down_seconds, len(self.live))
        self._down = None
        self.on_return(ready)
        self._probation.begin(sorted(self.live, key=lambda id: self.live[id].submit.priority))
        self._pump()

    def _deliver(self, step: StepOutput) -> None:
        live = self.live
        touched: dict[int, RequestStream] = {}
        self.stats = step.stats
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
        for id, stream in touched.items():
            self._probation.progress(id)
            previous = stream.timings.last_token
            stream.wake(step.now)
            if previous is not None and stream.timings.last_token == step.now:
                self.on_gap(step.now - previous)
            if stream.done:
                self._forget(stream)
        self.advanced = self.advanced or bool(touched)
        if len(self._probation):
            self._pump()
        self.on_step(step)

    def _broken(self, stream: RequestStream) -> None:
        """It could not take what was for it. That ends this request and no other."""
        log.exception("request %d failed on what the engine sent for it", stream.submit.id)
        self.fail(stream, internal_error())

    def _forget(self, stream: RequestStream) -> None:
        """Nothing more is expected for it. Does nothing the second time."""
        if self.live.pop(stream.submit.id, None) is not None:
            self._probation.forget(stream.submit.id)
            if stream.timings.scheduled is None:
                self.queued_tokens -= stream.usage.prompt_tokens
