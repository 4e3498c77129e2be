"""Events to frames: sse-starlette, told to frame as OpenAI's clients expect, and the writer of one response's chunks.

    data: {"id":…,"created":…,"model":…,"choices":[  delta  ],"usage":null}\n\n
          └───────────── head, once ──────────────┘ └ each ┘ └─ tail, once ─┘

A stream has `data:` lines and comments only; never `id:`, `retry:` or an empty `data:`, and `event:` only where the
protocol has typed events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.connection import OUTLET, Outlet
from server.errors import SURROGATE, RequestError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
QUIET_SECONDS = 10.0
"""A comment goes out where nothing was written for so long: silence never lasts 15 s."""
TEXT = "\0text"
"""Stands for a text that is not known yet."""

# This server drains by itself (`daemon`); sse-starlette would cut every stream at SIGTERM.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


def dumps(value: Any) -> bytes:
    """JSON; half a surrogate pair, which is no character, becomes U+FFFD."""
    try:
        return orjson.dumps(value)
    except TypeError:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return SURROGATE.sub("\ufffd", text).encode()


def typed(event: Mapping[str, Any]) -> bytes:
    """An event that says its type twice, as the clients of /v1/responses and /v1/messages read it."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event))


class Frames:
    """Serialises the chunks of one response: what is the same in all of them, once."""

    def __init__(
        self, fixed: dict[str, Any], null_usage: bool, shape: Callable[[int], dict[str, Any]] = lambda index: {}
    ) -> None:
        """`fixed`: id, object, created, model, system_fingerprint. `null_usage`: every chunk says "usage": null.

        `shape(index)`: a choice that brings only text, which is TEXT.
        """
        self._head = b"data: " + orjson.dumps(fixed)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"
        self._shape = shape
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """What stands before and behind the text of a choice."""

    def chunk(self, choice: bytes) -> bytes:
        """One choice, already JSON."""
        return self._head + choice + self._tail

    def text(self, index: int, text: str) -> bytes:
        """A choice that brings only text."""
        around = self._around.get(index)
        if around is None:
            before, _, behind = self.chunk(orjson.dumps(self._shape(index))).rpartition(orjson.dumps(TEXT))
            around = self._around[index] = before, behind
        return b"%b%b%b" % (around[0], dumps(text), around[1])

    def beside(self, choice: bytes, fields: dict[str, Any]) -> bytes:
        """The same with usage and the like beside it; no choice makes the last chunk of `include_usage`."""
        return self._head + choice + b"]," + orjson.dumps(fields)[1:] + b"\n\n"


def error_frames(error: RequestError) -> bytes:
    """How a stream that has begun ends when it fails."""
    return b"data: " + dumps(error.body()) + b"\n\n" + DONE


class EventStream(EventSourceResponse):
    """The response to a streaming request.

    sse-starlette minds head, end, disconnect and cancellation. What it does per event (a cancel scope with a timer, two
    layers of conversion) and per idle second (a task that polls, pings that write nothing) is done here more cheaply.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        """`frames` yields whole frames, any number at a time; each is one write. `close` is called when the response is
        over, even where it never began."""
        super().__init__(frames, headers={"Cache-Control": "no-cache"}, sep="\n")
        self._frames = frames
        self._close = close
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()
        self._outlet: Outlet | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet = scope.get("extensions", {}).get(OUTLET)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        outlet, clock = self._outlet, self._clock
        if outlet is not None:
            outlet.begun = True
        async with aclosing(self._frames) as frames:
            async for data in frames:
                self._written = clock()
                if outlet is None:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                elif not outlet.write(data):
                    # What comes meanwhile is merged in its RequestStream; its Connection knows how long is too long.
                    await outlet.drain()
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Comments where it is quiet: one timer per quiet period, however many events there are."""
        while self.active:
            quiet = self._clock() - self._written
            if quiet < QUIET_SECONDS:
                await asyncio.sleep(QUIET_SECONDS - quiet)
                continue
            self._written = self._clock()
            if self._outlet is None:
                async with self._send_lock:
                    if self.active:
                        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            elif self._outlet.room:
                self._outlet.write(KEEP_ALIVE)

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        """For ever: a drain is the daemon's."""
        await asyncio.get_running_loop().create_future()
