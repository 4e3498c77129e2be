"""Frames on the socket between the API process and the engine: 4 bytes of length, big-endian, then msgpack.

Both sides may use it; it knows nothing of sockets.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from scheduler.config import EngineConfig
from scheduler.messages import FromEngine, ToEngine

HEADER_BYTES = 4
MAX_FRAME = 1 << 28
"""Longer frames are garbage: the other end is not ours, or a header was lost."""

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_FAULTS = (msgspec.DecodeError, RecursionError)
"""What the decoder raises: the second where arrays lie in arrays, a thousand deep."""


class WireError(Exception):
    """The bytes are no frames of the expected kind."""


def frame(message: msgspec.Struct) -> bytearray:
    """One message, ready to be sent."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
    return buffer


class Frames(Generic[M]):
    """Cuts a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[M]:
        """Every message that is complete now; the rest is kept. Raises WireError."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        at = 0
        while len(buffer) - at >= HEADER_BYTES:
            length = int.from_bytes(buffer[at : at + HEADER_BYTES], "big")
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes; the limit is {MAX_FRAME}")
            end = at + HEADER_BYTES + length
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(buffer[at + HEADER_BYTES : end]))
            except _FAULTS as error:
                raise WireError(f"not a message: {error}") from error
            at = end
        del buffer[:at]
        return messages


def decode_config(payload: bytes | bytearray) -> EngineConfig:
    """The first message to the engine, without its header. Raises WireError."""
    try:
        return msgspec.msgpack.decode(payload, type=EngineConfig)
    except _FAULTS as error:
        raise WireError(f"not a configuration: {error}") from error


def to_engine_frames() -> Frames[ToEngine]:
    """All later ones."""
    return Frames(msgspec.msgpack.Decoder(ToEngine))


def from_engine_frames() -> Frames[FromEngine]:
    """What the engine sends."""
    return Frames(msgspec.msgpack.Decoder(FromEngine))
