"""Bodies that are no JSON, or only nearly."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from server.body import MAX_PARTS, MAX_SEARCHED, MAX_VALUES, SCAN_BYTES, parse_json
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
    assert refused(rb'{"metadata": {"ok": "v", "\udc00b": 1}}').param == "metadata.?b"


def test_a_long_key_over_many_entries_costs_no_more_than_the_body() -> None:
    body = b'{"' + b"k" * 100_000 + b'": [' + b"0," * 20_000 + rb'"\ud800"]}'
    tracemalloc.start()
    error = refused(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * len(body)
    assert error.param is not None
    assert len(error.param) <= 256


FULL = MAX_PARTS + 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"x": [' + b"[]," * FULL + b"[]]}", f"more than {MAX_PARTS} strings"),
        (b'{"x": [' + b"{}," * FULL + b"{}]}", f"more than {MAX_PARTS} strings"),
        (b'{"prompt": [' + b'"a",' * FULL + b'"a"]}', f"more than {MAX_PARTS} strings"),
        (b'{"x": {' + b'"a":1,' * FULL + b'"a":1}}', f"more than {MAX_PARTS} strings"),
        (b'{"prompt": [' + b'"a",' * FULL + rb'"\ud800"]}', f"more than {MAX_PARTS} strings"),
        (b'"' * 3 * FULL, f"more than {MAX_PARTS} strings"),
        (b'{"tokens": [' + b"1," * MAX_VALUES + b"1]}", f"more than {MAX_VALUES} values"),
    ],
    ids=["arrays", "objects", "strings", "keys", "surrogate", "quotes", "numbers"],
)
def test_a_body_of_too_many_parts_is_not_parsed(body: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread gets a turn while it is: every stream would stand still."""
    monkeypatch.setattr("server.body.orjson.loads", lambda _: pytest.fail("parsed"))
    monkeypatch.setattr("server.body.json.loads", lambda _: pytest.fail("parsed"))
    assert words in refused(body).message


@pytest.mark.parametrize(
    "text",
    ['a, [b], {"c": "d"}\\\n' * 200_000, '"' * 500_000, "\\" * 500_001, "\\" * (SCAN_BYTES - 8) + '",' * 200_000],
    ids=["brackets", "quotes", "backslashes", "edge"],
)
def test_what_stands_in_a_text_is_not_counted(text: str) -> None:
    assert parse_json(json.dumps({"prompt": text, "n": [1, 2]}).encode()) == {"prompt": text, "n": [1, 2]}


def test_a_list_of_a_million_token_ids_is_no_large_body() -> None:
    assert len(parse_json(b"[" + b"7," * 1_000_000 + b"7]")) == 1_000_001


def test_a_text_that_does_not_end() -> None:
    for end in (b"", b"\\", b'\\"'):
        assert "not valid JSON" in refused(b'{"a": "' + b"x" * FULL + end).message


def test_a_broken_body_of_many_parts_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.body.json.loads", lambda _: pytest.fail("searched"))
    error = refused(b'{"x": [' + b"[]," * MAX_SEARCHED + rb'"\ud800"]}')
    assert error.param is None
    assert error.message.startswith("body: ")
