"""The engine's end of the socket: an inbox that is drained and an outbox that never blocks.

      socket ──▶ receive() ──▶ Engine.step ──▶ send() ──▶ outbox ──▶ socket, as fast as the other side reads

A slow reader costs memory, not time: what it has not read lies in the outbox. The outbox is bounded by the work that
was submitted, for a process that does not read does not submit either.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque

from scheduler.config import EngineConfig
from scheduler.messages import FromEngine, ToEngine
from scheduler.wire import HEADER_BYTES, decode_config, frame, to_engine_frames

CHUNK = 1 << 18


class Closed(Exception):
    """The other side has gone."""


class Channel:
    """Owns the socket. One thread uses it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._writing = False
        """Whether the selector waits for room to write as well."""
        self._outbox: deque[memoryview] = deque()
        self._frames = to_engine_frames()

    def config(self) -> EngineConfig:
        """The first message; waits for it. Raises Closed, WireError."""
        length = int.from_bytes(self._exactly(HEADER_BYTES), "big")
        return decode_config(self._exactly(length))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            part = self._recv(count - len(data))
            data += part
            if not part:
                self._wait()
        return data

    def receive(self, wait: bool) -> list[ToEngine]:
        """What has arrived; `wait`: until something has, using no CPU. Sends what the socket takes.

        Raises Closed, WireError.
        """
        self._flush()
        messages: list[ToEngine] = []
        while True:
            data = self._recv(CHUNK)
            if data:
                messages += self._frames.feed(data)
            elif messages or not wait:
                return messages
            else:
                self._wait()
                self._flush()

    def send(self, message: FromEngine) -> None:
        """Queue a message and send what the socket takes now. Never waits. Raises Closed."""
        self._outbox.append(memoryview(frame(message)))
        self._flush()

    def drain(self) -> None:
        """Wait until everything is sent. Raises Closed."""
        while self._outbox:
            self._wait()
            self._flush()

    def close(self) -> None:
        self._selector.close()
        self._socket.close()

    def _recv(self, most: int) -> bytes:
        """What is there; empty where nothing is."""
        try:
            data = self._socket.recv(most)
        except BlockingIOError:
            return b""
        except ConnectionError as error:
            raise Closed from error
        if not data:
            raise Closed
        return data

    def _wait(self) -> None:
        """Until the socket brings something, or takes what waits in the outbox."""
        if self._writing != bool(self._outbox):
            self._writing = bool(self._outbox)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._socket, events)
        self._selector.select()

    def _flush(self) -> None:
        outbox = self._outbox
        try:
            while outbox:
                sent = self._socket.send(outbox[0])
                if sent < len(outbox[0]):
                    outbox[0] = outbox[0][sent:]
                else:
                    outbox.popleft()
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise Closed from error
