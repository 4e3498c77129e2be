"""What the ranks of a split model say to each other beside the tensors: frames over a socket pair of each with rank 0.

    rank 0                                            rank 1, 2, …
      Setup ───────────────────────────────────────▶   (first message)
      Order ───────────────────────────────────────▶   before every step: what has come from the clients
            ◀───────────────────────────────────────  Vote: how the rank fared in the step
      Verdict ─────────────────────────────────────▶   how the step ended, for all of them

Every rank runs the same scheduler, so nothing else need be said; but whatever could differ between two processes comes
from rank 0: the messages, the time, what was drawn.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec
import numpy as np

from model.batch import StepResult
from model.params import Logprob
from scheduler.config import EngineConfig
from scheduler.messages import ToEngine
from scheduler.wire import HEADER_BYTES, MAX_FRAME, WireError, frame

M = TypeVar("M", bound=msgspec.Struct)


class Setup(msgspec.Struct, frozen=True):
    """What a rank is to load."""

    config: EngineConfig
    rank: int
    store: str
    """File in which the ranks find each other."""


class Order(msgspec.Struct, frozen=True):
    """Begin a step."""

    now: float
    """CLOCK_MONOTONIC of rank 0, which is the time of all of them until the verdict."""
    messages: list[ToEngine]


class Vote(msgspec.Struct, frozen=True):
    """How a rank fared in a step."""

    step: int
    """Its mark (`scheduler.ranked`), which must be rank 0's."""
    failure: str | None
    """Why it could not compute its part; None: it could."""


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """A StepResult."""

    tokens: list[list[int]]
    logprobs: list[list[Logprob]]
    prompt_logprobs: list[list[Logprob] | None]
    pooled: dict[int, bytes]

    @staticmethod
    def of(result: StepResult) -> Drawn:
        pooled = {row: vector.tobytes() for row, vector in result.pooled.items()}
        return Drawn(result.tokens, result.logprobs, result.prompt_logprobs, pooled)

    def result(self) -> StepResult:
        pooled = {row: np.frombuffer(vector, np.float64) for row, vector in self.pooled.items()}
        return StepResult(self.tokens, self.logprobs, self.prompt_logprobs, pooled)


class Verdict(msgspec.Struct, frozen=True):
    """The end of a step: the same on every rank."""

    now: float
    failure: str | None
    """Why some rank failed; else `drawn` is there."""
    drawn: Drawn | None


class Link:
    """One end of such a pair. Blocks; owns the socket."""

    def __init__(self, sock: socket.socket, lost: Callable[[Exception], NoReturn]) -> None:
        """`lost` is called where the other end has gone; it does not return."""
        self._socket = sock
        self._lost = lost

    def send(self, message: msgspec.Struct) -> None:
        self.write(frame(message))

    def write(self, data: bytes | bytearray) -> None:
        """A frame."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            self._lost(error)

    def receive(self, kind: type[M]) -> M:
        """The next message, which is of this kind. Raises WireError where it is not."""
        length = int.from_bytes(self._exactly(HEADER_BYTES), "big")
        if length > MAX_FRAME:
            raise WireError(f"a frame of {length} bytes; the limit is {MAX_FRAME}")
        try:
            return msgspec.msgpack.decode(self._exactly(length), type=kind)
        except msgspec.DecodeError as error:
            raise WireError(f"not a {kind.__name__}: {error}") from error

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                part = self._socket.recv_into(view[got:])
            except OSError as error:
                self._lost(error)
            if not part:
                self._lost(EOFError("the other end is closed"))
            got += part
        return data
