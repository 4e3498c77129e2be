"""Bodies that are no JSON, or only nearly."""

from __future__ import annotations

import tracemalloc

import pytest

from server.body import parse_json
from server.errors import InvalidRequest


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body)
    return caught.value


def test_half_a_surrogate_pair_is_named_by_its_place() -> None:
    assert refused(rb'{"messages": [{"content": "ok"}, {"content": "\ud83d"}]}').param == "messages.1.content"


def test_half_a_surrogate_pair_in_a_key_as_well() -> None:
    """The answer must be JSON itself."""
    error = refused(rb'{"a\ud83d": "\ud83d"}')
    assert error.param == "a?"


def test_a_long_key_over_many_entries_costs_no_more_than_the_body() -> None:
    body = b'{"' + b"k" * 100_000 + b'": [' + b"0," * 20_000 + rb'"\ud800"]}'
    tracemalloc.start()
    error = refused(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * len(body)
    assert error.param is not None
    assert len(error.param) <= 256
