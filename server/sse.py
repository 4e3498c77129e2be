"""Events to frames: sse-starlette, told to frame as OpenAI's clients expect, and the writer of one response's chunks.

    data: {"id":…,"created":…,"model":…,"choices":[  delta  ],"usage":null}\n\n
          └───────────── head, once ──────────────┘ └ each ┘ └─ tail, once ─┘

A stream has `data:` lines and comments only; never `id:`, `retry:`, `event:` or an empty `data:`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.errors import RequestError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PING_SECONDS = 5.0
QUIET_SECONDS = 9.0
"""A comment goes out at a ping when nothing was written for so long: silence never lasts 15 s."""
SEND_SECONDS = 60.0
"""A client that reads nothing for so long is gone."""

# This server drains by itself (`daemon`); sse-starlette would cut every stream at SIGTERM.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class Frames:
    """Serialises the chunks of one response: what is the same in all of them, once."""

    def __init__(self, fixed: dict[str, Any], null_usage: bool) -> None:
        """`fixed`: id, object, created, model, system_fingerprint. `null_usage`: every chunk says "usage": null."""
        self._head = b"data: " + orjson.dumps(fixed)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """One choice, already JSON."""
        return self._head + choice + self._tail

    def with_usage(self, choice: bytes, usage: dict[str, Any]) -> bytes:
        """The same with usage; no choice makes the last chunk of `include_usage`."""
        return self._head + choice + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


def error_frames(error: RequestError) -> bytes:
    """How a stream that has begun ends when it fails."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE


class EventStream(EventSourceResponse):
    """The response to a streaming request."""

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        """`frames` yields whole frames, any number at a time. `close` is called when the response is over, even where
        it never began."""
        self._close = close
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()
        super().__init__(
            self._watched(frames),
            headers={"Cache-Control": "no-cache"},
            sep="\n",
            ping=PING_SECONDS,
            ping_message_factory=self._keep_alive,  # type: ignore[arg-type]  # bytes are sent as they are
            send_timeout=SEND_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def _watched(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(frames):
            async for frame in frames:
                self._written = self._clock()
                yield frame

    def _keep_alive(self) -> bytes:
        """A comment where the stream was quiet; else nothing, which writes nothing."""
        quiet = self._clock() - self._written >= QUIET_SECONDS
        return KEEP_ALIVE if quiet else b""
