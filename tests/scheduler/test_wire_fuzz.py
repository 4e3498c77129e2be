"""Any message comes back as it was, however the stream is cut; any other bytes are messages or a WireError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from scheduler.config import EngineConfig
from scheduler.messages import FromEngine, ToEngine
from scheduler.wire import HEADER_BYTES, Frames, WireError, decode_config, frame, from_engine_frames, to_engine_frames
from tests.fuzzing import fuzz, mangled, within

MEMORY = 4 << 20
SIDES: list[Callable[[], Frames[Any]]] = [to_engine_frames, from_engine_frames]


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Everything that a field of this type may hold."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return st.one_of([values(one) for one in types])
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=4)
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=4).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
    return {
        inspect.IntType: st.integers(-(2**63), 2**64 - 1),
        inspect.FloatType: st.floats(allow_nan=False),
        inspect.StrType: st.text(max_size=20),
        inspect.BytesType: st.binary(max_size=20),
        inspect.BoolType: st.booleans(),
        inspect.NoneType: st.none(),
    }[type(kind)]


def messages(side: Any) -> st.SearchStrategy[msgspec.Struct]:
    return values(inspect.type_info(side))


STREAMS = [(to_engine_frames, messages(ToEngine)), (from_engine_frames, messages(FromEngine))]


@pytest.mark.parametrize(("frames", "message"), STREAMS, ids=["to", "from"])
@fuzz(80)
@given(data=st.data())
def test_what_goes_in_comes_out(
    frames: Callable[[], Frames[Any]], message: st.SearchStrategy[msgspec.Struct], data: st.DataObject
) -> None:
    sent = data.draw(st.lists(message, max_size=4))
    stream = b"".join(frame(one) for one in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    reader, got = frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == sent


@fuzz(40)
@given(config=messages(EngineConfig))
def test_the_configuration_too(config: EngineConfig) -> None:
    assert decode_config(frame(config)[HEADER_BYTES:]) == config


def fed(frames: Callable[[], Frames[Any]], stream: bytes, cut: int) -> tuple[list[Any], bool]:
    """The messages before the first fault, and whether there was one."""
    reader, got = frames(), []
    try:
        for part in (stream[:cut], stream[cut:]):
            got += reader.feed(part)
    except WireError:
        return got, True
    return got, False


@pytest.mark.parametrize(("frames", "message"), STREAMS, ids=["to", "from"])
@fuzz(150)
@given(data=st.data())
def test_mangled_messages(
    frames: Callable[[], Frames[Any]], message: st.SearchStrategy[msgspec.Struct], data: st.DataObject
) -> None:
    """The payload is mangled, and its length is right; so it is the decoder that has to cope."""
    payload = data.draw(mangled(bytes(frame(data.draw(message))[HEADER_BYTES:])))
    stream = len(payload).to_bytes(HEADER_BYTES, "big") + payload
    with within(2, MEMORY):
        whole = fed(frames, stream, len(stream))
        assert fed(frames, stream, data.draw(st.integers(0, len(stream)))) == whole


@fuzz(100)
@given(stream=st.binary(max_size=200), frames=st.sampled_from(SIDES), cut=st.integers(0, 200))
def test_any_bytes(stream: bytes, frames: Callable[[], Frames[Any]], cut: int) -> None:
    with within(2, MEMORY):
        fed(frames, stream, cut)


ABSURD = [
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xff",  # as many bytes
    b"\xdb\xff\xff\xff\xff",  # a text
    b"\x91" * 100_000,  # arrays in arrays
    b"\x81\xa1x" * 100_000,
    b"\xa1\xff",  # no UTF-8
    b"\xd9\x02\xed\xa0",
]


def field(message: bytes, name: str, value: bytes) -> bytes:
    """A message of two entries: its tag, and a field of that value."""
    tag, key = message, name.encode()
    return b"\x82\xa4type" + bytes([0xA0 + len(tag)]) + tag + bytes([0xA0 + len(key)]) + key + value


@pytest.mark.parametrize("value", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.parametrize("name", ["prompt_ids", "tenant", "salt", "generated", "params", "unheard_of", "id"])
def test_absurd_sizes_and_depths(value: bytes, name: str) -> None:
    for payload in (value, field(b"submit", name, value)):
        stream = len(payload).to_bytes(HEADER_BYTES, "big") + payload
        with within(1, MEMORY):
            _, wrong = fed(to_engine_frames, stream, 3)
            assert wrong
            with suppress(WireError):  # fields that it does not know are skipped
                decode_config(payload)
