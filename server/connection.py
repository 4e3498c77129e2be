"""One HTTP connection: uvicorn's on h11, with a limit on how long a request's head may take to arrive, and a short way
out for the bodies of streams.

uvicorn waits for ever for a first request, and for the rest of one that has begun. It limits the head's size, and idle
time between requests; `body` limits a body's size and time.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
OUTLET = "octavo.outlet"
"""Among a request's ASGI extensions: its Outlet."""


class Outlet:
    """Writes parts of a chunked body straight to the transport.

    A part on its way through `send` passes every layer's wrapper and h11's state machine, for no more than a length in
    front of it. Head and end of the response must go through `send`.
    """

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def write(self, data: bytes) -> bool:
        """One part, not empty, as one write; nothing where the client has gone. Whether there is room for the next."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Until there is room, or the client has gone."""
        await self._flow.drain()

    def abort(self) -> None:
        """Hang up, without what was not sent yet."""
        self._transport.abort()


class Connection(H11Protocol):
    """Closes itself where a client is slow to say what it wants."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = self._answer
        self._deadline = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._disarm()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":  # then a body without a length is chunked
            scope["extensions"] = {OUTLET: Outlet(self.transport, self.flow)}
        await self.config.loaded_app(scope, receive, send)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
