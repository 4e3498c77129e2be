"""One HTTP connection: uvicorn's on h11, with limits on how long a request's head may take to arrive and a client to
take its answer, and a short way out for the bodies of streams.

uvicorn waits for ever for a first request, for the rest of one that has begun, and for a client that reads nothing. It
limits the head's size, and idle time between requests; `body` limits a body's size and time, `connections` how many
connections there are.

The system takes SEND_BYTES that a client has not been sent yet, and no more: so it is known early that a client is
slow, and what comes for it meanwhile is merged in its RequestStream instead of lying in megabytes of buffers. A client
that takes less than half of that in --send-timeout, where something waits for it, is hung up on.

A client that is refused may still be sending, and a socket that is closed with something unread resets the connection:
its system then forgets the answer that it has. So after such an answer the connection ends its own side, and for a
moment reads on, to throw away what comes.

A client may shut down its sending side once its request is complete, and is answered. From here that looks just as if
it had gone, so the connection is given a few bytes that mean nothing: a client that is gone resets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.connections import Connections
from server.errors import InvalidRequest, RequestError, Unavailable, error_response

log = logging.getLogger("octavo.http")

HEAD_SECONDS = 30.0
MAX_HEADERS = 128
SMALL_BYTES, MAX_SMALL = 64, 2**14
"""Pieces of a body smaller than that, and how many of them a request may have: each costs as much as kilobytes do."""
SEND_BYTES = 2**16
NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
LINGER_SECONDS, LINGER_BYTES = 1.0, 2**25
"""After its last answer, for a client to notice while it is sending a request, and how much of that is read."""
DRAIN_SECONDS = 0.5
"""At the end of a drain, for the rest of an answer to be read."""
RESET_SECONDS = 0.25
"""Between two looks at whether a client that sends no more has reset the connection."""
LOG_SECONDS = 10.0
"""At least so long between two lines about malformed requests."""
PROBE, PROBE_IN_STREAM = b"HTTP/1.1 100 Continue\r\n\r\n", b":\n\n"
OUTLET = "octavo.outlet"
"""Among a request's ASGI extensions: its Outlet."""


class Door:
    """The transport as a request sees it: to close it is to hang up in good order."""

    __slots__ = ("_connection", "write")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write

    def is_closing(self) -> bool:
        return self._connection.ending or self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.hang_up()


class Outlet:
    """Writes parts of a chunked body straight to the transport.

    A part on its way through `send` passes every layer's wrapper and h11's state machine, for no more than a length in
    front of it. Head and end of the response must go through `send`.
    """

    __slots__ = ("_door", "_flow", "begun")

    def __init__(self, door: Door, flow: FlowControl) -> None:
        self._door = door
        self._flow = flow
        self.begun = False
        """Whether the head of a response is out whose parts go this way."""

    @property
    def room(self) -> bool:
        """Whether nothing waits for the client."""
        return not self._flow.write_paused

    def write(self, data: bytes) -> bool:
        """One part, not empty, as one write; nothing where the client has gone. Whether there is room for the next."""
        if not self._door.is_closing():
            self._door.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Until there is room, or the client has gone."""
        await self._flow.drain()


class _Wire(h11.Connection):
    """Refuses a body in countless small pieces."""

    _small = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Data and len(event.data) < SMALL_BYTES:
            self._small += 1
            if self._small > MAX_SMALL:
                raise h11.RemoteProtocolError("a body in too many small pieces")
        return event

    def start_next_cycle(self) -> None:
        self._small = 0
        super().start_next_cycle()


class Connection(H11Protocol):
    """Closes itself where a client is slow to say what it wants, or to take what it asked for."""

    _deadline: asyncio.TimerHandle | None = None
    _watch: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes that waited for the client when `_stall` was set."""
    _outlet: Outlet | None = None
    ending = False
    """It has had its last answer, and may still be sending."""
    _spare = 0
    """Bytes that are still read then."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        """`given`: by uvicorn."""
        super().__init__(**given)
        self._all = connections
        self.conn = _Wire(h11.SERVER, self.config.h11_max_incomplete_event_size or SEND_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = self._answer
        self._door = Door(self)
        transport.set_write_buffer_limits(0)  # told when the first byte waits, and when none does any more
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # the client may have gone already
            # asyncio does so only where the listening socket names its protocol. A token must not wait for the one
            # before it to be acknowledged, which takes up to 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if NOT_SENT is not None:
                sock.setsockopt(socket.IPPROTO_TCP, NOT_SENT, SEND_BYTES)
        if self._all.enter(self):
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._no_head)
        else:
            self._refuse(Unavailable(f"The server has {self._all.limit} connections, and takes no more."))

    def data_received(self, data: bytes) -> None:
        if self.ending:
            self._spare -= len(data)
            if self._spare < 0:
                self.transport.close()
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            if not self.cycle.more_body:
                self._all.answered(self)
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._no_head)

    def on_response_complete(self) -> None:
        if self.ending:
            return
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle.response_complete or self.cycle.more_body):
            self._all.asks(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._all.send_seconds, self._slow)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _slow(self) -> None:
        """Something has waited for the client all the time: see whether it reads at all."""
        unsent = self.transport.get_write_buffer_size()
        if self._unsent - unsent < SEND_BYTES // 2:
            self._all.dropped["send_timeout"] += 1
            self.drop()
        else:  # a large answer on its way
            self._unsent = unsent
            self._stall = self.loop.call_later(self._all.send_seconds, self._slow)

    def _no_head(self) -> None:
        self._all.dropped["head_timeout"] += 1
        self.transport.close()

    def drop(self) -> None:
        """Hang up, without what was not sent yet."""
        self.transport.abort()

    def hang_up(self) -> None:
        """An answer is out, and is the last one."""
        if self.cycle.more_body or self.conn.trailing_data[0]:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close as soon as the client has, or after a moment."""
        if self.transport.is_closing() or self.ending:
            return
        if self._watch is not None:  # it sends no more
            self.transport.close()
            return
        self.ending, self._spare = True, LINGER_BYTES
        self._all.ends(self)
        self._unset_keepalive_if_required()
        self._disarm()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        with contextlib.suppress(OSError):  # the client may have gone already
            self.transport.write_eof()
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """The drain is over: nobody waits for who has not said what it wants, nor for long for who does not read."""
        cycle = self.cycle
        if not self.ending:
            if cycle is None or not cycle.more_body:
                super().shutdown()
            elif cycle.response_complete:
                self._linger()
            else:
                self.drop()
        if self.ending or self.flow.write_paused:
            self.loop.call_later(DRAIN_SECONDS, self.drop)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection, to answer a request that is complete. HTTP/1.0 knows no answer before the answer
        and so no probe: there the end of a client's data is the end."""
        cycle = self.cycle
        if self.ending or cycle is None or cycle.more_body or cycle.response_complete:
            return None
        if cycle.scope["http_version"] != "1.1":
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
        for timer in (self._watch, self._stall):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self._all.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP, in the shape of every other refusal."""
        _log_malformed(self.client)
        self._refuse(InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, error: RequestError) -> None:
        """Say why, unless an answer has begun, and hang up."""
        begun = self.conn.our_state is h11.SEND_BODY
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = error_response(error)
            reply.headers["connection"] = "close"
            phrase = HTTPStatus(reply.status_code).phrase.encode()
            head = h11.Response(status_code=reply.status_code, headers=reply.raw_headers, reason=phrase)
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.transport.close()
        else:
            self._linger()

    def _unsupported_upgrade_warning(self) -> None:
        """Not a word: a request to become a WebSocket is answered as if it had not asked."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.cycle.transport = self._door  # type: ignore[assignment]
        headers, wrong = scope["headers"], ""
        if scope["http_version"] not in ("1.0", "1.1"):
            wrong = "version: HTTP/1.0 or HTTP/1.1 is understood"
        elif len(headers) > MAX_HEADERS:
            wrong = f"headers: more than {MAX_HEADERS}"
        elif {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # A proxy in front may have gone by the other one: where this request ends is a matter of opinion.
            wrong = "content-length: not allowed together with transfer-encoding"
        if wrong:
            error = InvalidRequest(wrong, code="invalid_http", headers={"connection": "close"})
            await error_response(error)(scope, receive, send)
            return
        if scope["http_version"] == "1.1":  # then a body without a length is chunked
            self._outlet = Outlet(self._door, self.flow)
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
