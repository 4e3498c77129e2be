"""One HTTP connection: uvicorn's on h11, with a limit on how long a request's head may take to arrive, and a short way
out for the bodies of streams.

uvicorn waits for ever for a first request, and for the rest of one that has begun. It limits the head's size, and idle
time between requests; `body` limits a body's size and time.

A client may shut down its sending side once its request is complete, and is answered. From here that looks just as if
it had gone, so the connection is given a few bytes that mean nothing: a client that is gone resets it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import InvalidRequest, RequestError, error_response

log = logging.getLogger("octavo.http")

HEAD_SECONDS = 30.0
RESET_SECONDS = 0.25
"""Between two looks at whether a client that sends no more has reset the connection."""
LOG_SECONDS = 10.0
"""At least so long between two lines about malformed requests."""
PROBE, PROBE_IN_STREAM = b"HTTP/1.1 100 Continue\r\n\r\n", b":\n\n"
OUTLET = "octavo.outlet"
"""Among a request's ASGI extensions: its Outlet."""


class Outlet:
    """Writes parts of a chunked body straight to the transport.

    A part on its way through `send` passes every layer's wrapper and h11's state machine, for no more than a length in
    front of it. Head and end of the response must go through `send`.
    """

    __slots__ = ("_flow", "_transport", "begun")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self.begun = False
        """Whether a part was written."""

    def write(self, data: bytes) -> bool:
        """One part, not empty, as one write; nothing where the client has gone. Whether there is room for the next."""
        self.begun = True
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
    _watch: asyncio.TimerHandle | None = None
    _outlet: Outlet | None = None

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

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection, to answer a request that is complete. HTTP/1.0 knows no answer before the answer
        and so no probe: there the end of a client's data is the end."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or cycle.scope["http_version"] != "1.1":
            return None
        cycle.keep_alive = False
        if not cycle.response_started:
            self.transport.write(PROBE)
        elif self._outlet is not None and self._outlet.begun:
            self._outlet.write(PROBE_IN_STREAM)
        self._watch = self.loop.call_later(RESET_SECONDS, self._look)
        return True

    def _look(self) -> None:
        """Nobody reads from the socket any more, so nobody else learns of a reset."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(RESET_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP, in the shape of every other refusal; none where an answer has begun."""
        _log_malformed(self.client)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = error_response(InvalidRequest(msg, code="invalid_http"))
            reply.headers["connection"] = "close"
            head = h11.Response(status_code=reply.status_code, headers=reply.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Not a word: a request to become a WebSocket is answered as if it had not asked."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            # A proxy in front may have gone by the other one: where this request ends is a matter of opinion.
            error: RequestError = InvalidRequest(
                "content-length: not allowed together with transfer-encoding",
                code="invalid_http",
                headers={"connection": "close"},
            )
            await error_response(error)(scope, receive, send)
            return
        if scope["http_version"] == "1.1":  # then a body without a length is chunked
            self._outlet = Outlet(self.transport, self.flow)
            scope["extensions"] = {OUTLET: self._outlet}
        await self.config.loaded_app(scope, receive, send)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Malformed:
    """Requests that were no HTTP since the last line about them, and when that was."""

    count = 0
    said = -LOG_SECONDS


def _log_malformed(client: tuple[str, int] | None) -> None:
    _Malformed.count += 1
    now = time.monotonic()
    if now - _Malformed.said >= LOG_SECONDS:
        log.warning("%d malformed requests, the last from %s", _Malformed.count, client[0] if client else "?")
        _Malformed.count, _Malformed.said = 0, now


logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")
