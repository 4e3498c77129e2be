"""Streams of bytes, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.outcome import Failure, Outcome
from loadtest.stream import AnswerStream, error_message
from tests.loadtest.scripted import completion_events, event


def read(*timed: tuple[float, bytes], end: float = 9.0) -> Outcome:
    outcome = Outcome(scheduled=0.0, sent=0.0, input_tokens=3)
    stream = AnswerStream(outcome)
    for now, data in timed:
        stream.feed(data, now)
    stream.finish(end)
    return outcome


def test_times_and_usage() -> None:
    one, two, usage, done = completion_events(["a", "b"], prompt_tokens=7, completion_tokens=12)
    outcome = read((1.0, one), (2.5, two), (2.75, usage), (3.0, done))
    assert outcome.failure is None
    assert outcome.arrivals == [1.0, 2.5]
    assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (7, 12, 16)
    assert outcome.counted
    assert (outcome.ttft, outcome.e2el, outcome.itls) == (1.0, 2.75, [1.5])
    assert outcome.tpot == (2.75 - 1.0) / 11


def test_tokens_without_text_are_seen_where_the_server_names_them() -> None:
    def chunk(ids: str, text: str) -> bytes:
        return b'data: {"choices":[{"prompt_token_ids":[9],"text":"%s"%s}]}\n\n' % (text.encode(), ids.encode())

    named = read((1.0, chunk(',"token_ids":[1]', "a")), (2.0, chunk(',"token_ids": [2]', "")), (3.0, chunk("", "b")))
    assert named.beats == [1.0, 2.0]
    assert named.arrivals == [1.0, 3.0]
    assert read((1.0, chunk(',"token_ids":[]', "a"))).beats == []


@given(st.lists(st.integers(0, 600), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_cuts_do_not_matter(cuts: list[int], newline: bytes) -> None:
    data = b": hello\n\n" + b"".join(completion_events(['say "x"', "é\n\nb", "c"], 7, 3))
    data = data.replace(b"\n", newline)
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    parts = [data[a:b] for a, b in itertools.pairwise(places)]
    outcome = read(*((1.0, part) for part in parts))
    assert (outcome.failure, len(outcome.arrivals), outcome.output_tokens) == (None, 3, 3)


@pytest.mark.parametrize(
    ("chunk", "is_content"),
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":null}}]}', False),
        (b'{"choices":[{"delta":{"content":"x"}}]}', True),
        (b'{"choices": [{"delta": {"content": "\\""}}]}', True),
        (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', True),
        (b'{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":""}}]}}]}', False),
        (b'{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}', True),
        (b'{"choices":[{"text":"","note":"\\"text\\":\\"fake\\""}]}', False),
        (b'{"choices":[{"text":" "}]}', True),
    ],
)
def test_what_counts_as_content(chunk: bytes, is_content: bool) -> None:
    outcome = read((4.0, b"data: " + chunk + b"\n\n"), (5.0, b"data: [DONE]\n\n"))
    assert outcome.failure is None
    assert outcome.arrivals == ([4.0] if is_content else [])
    assert outcome.ttft == 4.0


def test_without_usage_tokens_are_chunks() -> None:
    *events, _, done = completion_events(["a", "b", "c"], 1, 99)
    outcome = read((1.0, b"".join(events) + done))
    assert (outcome.counted, outcome.output_tokens, outcome.input_tokens) == (False, 3, 3)


def test_usage_beside_content() -> None:
    chunk = {
        "choices": [{"text": "ab", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 9},
    }
    outcome = read((1.0, event(chunk)), (1.0, b"data: [DONE]\n\n"))
    assert (outcome.output_tokens, outcome.arrivals, outcome.failure) == (9, [1.0], None)


def test_named_events() -> None:
    outcome = read((1.0, b'event: completion\ndata: {"choices":[{"text":"x"}]}\n\ndata:[DONE]\n\n'))
    assert (outcome.arrivals, outcome.failure) == ([1.0], None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'data: {"error":{"message":"engine died","code":500}}\n\n', "error event"),
        (b'data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n', "error event"),
        (b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n', "stream cut"),
        (b'data: {"choices":[{"text":"x"', "stream cut"),
        (b"", "stream cut"),
        (b"data: nonsense\n\ndata: [DONE]\n\n", "bad event"),
        (b"data: 17\n\ndata: [DONE]\n\n", "bad event"),
    ],
)
def test_failures(data: bytes, kind: str) -> None:
    failure = read((1.0, data)).failure
    assert failure is not None
    assert failure.kind == kind


def test_finish_reason_is_an_end_too() -> None:
    outcome = read((1.0, event({"choices": [{"text": "x", "finish_reason": "stop"}]})))
    assert outcome.failure is None


def test_error_messages_of_all_shapes() -> None:
    assert error_message({"error": {"message": "too\nlong"}}) == "too long"
    assert error_message({"detail": "nope"}) == "nope"
    assert error_message({"error": "plain"}) == "plain"
    assert error_message("<html>\n502</html>") == "<html> 502</html>"
    assert read((1.0, b'data: {"error":{"message":"m"}}\n\n')).failure == Failure("error event", "m")
