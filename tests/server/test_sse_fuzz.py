"""What a strict reader gets of a stream is what went into it, whatever text that is."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import EngineError
from server.sse import DONE, TEXT, Frames, error_frames, typed
from tests.fuzzing import fuzz
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running

SURROGATE = re.compile("[\ud800-\udfff]")
NASTY = st.sampled_from(
    ["\r", "\n", "\r\n", "\n\n", "\0", "\u2028", "\u2029", "\x85", "data: ", ": ", "\ufeff", "\ud83d"]
)
TEXTS = st.lists(NASTY | st.text(st.characters(exclude_categories=[]), max_size=6), max_size=6).map("".join)


def read(stream: bytes) -> list[tuple[str, str]]:
    """(event, data) of every event, as the standard says it is read: server-sent events, HTML living standard 9.2.6."""
    text = codecs.decode(stream, "utf-8", "strict").removeprefix("\ufeff")
    events: list[tuple[str, str]] = []
    kind = ""
    data: list[str] = []
    lines = re.split("\r\n|\n|\r", text)
    assert lines.pop() == "", "the last line is not ended"
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append((kind or "message", "\n".join(data)))
            kind, data = "", []
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        else:
            assert not name, f"a field {name!r}"
    assert not data, "the last event is not ended"
    return events


def whole(text: str) -> str:
    """Half a surrogate pair is no character, and goes out as the sign for that."""
    return SURROGATE.sub("\ufffd", text)


@fuzz(150)
@given(texts=st.lists(TEXTS, max_size=4), index=st.integers(0, 200), id=st.text(max_size=8), null_usage=st.booleans())
def test_texts(texts: list[str], index: int, id: str, null_usage: bool) -> None:
    def shape(index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"content": TEXT}}

    frames = Frames({"id": id, "model": TEXT}, null_usage, shape)
    written = [frames.text(index, text) for text in texts]
    for text, frame in zip(texts, written, strict=True):
        ((kind, data),) = read(frame)
        chunk = json.loads(data)
        assert kind == "message"
        assert (chunk["id"], chunk["model"]) == (id, TEXT)
        assert chunk["choices"] == [{"index": index, "delta": {"content": whole(text)}}]
        assert ("usage" in chunk) == null_usage
    assert len(read(b"".join(written))) == len(texts)


@fuzz(100)
@given(event=st.dictionaries(st.text(max_size=5), TEXTS | st.lists(TEXTS, max_size=3), max_size=4))
def test_typed_events(event: dict[str, Any]) -> None:
    ((kind, data),) = read(typed({**event, "type": "response.output_text.delta"}))
    assert kind == "response.output_text.delta"
    expected = json.loads(whole(json.dumps({**event, "type": kind}, ensure_ascii=False)))
    assert json.loads(data) == expected


@fuzz(50)
@given(message=TEXTS, param=st.none() | TEXTS)
def test_errors(message: str, param: str | None) -> None:
    (_, data), (_, last) = read(error_frames(EngineError(message, param=param)))
    error = json.loads(data)["error"]
    assert error["message"] == whole(message)
    assert error["param"] == (None if param is None else whole(param))
    assert last == "[DONE]"
    assert read(DONE) == [("message", "[DONE]")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"])
@fuzz(10)
@given(reply=st.lists(st.integers(0, 49_151), min_size=1, max_size=12))
def test_any_tokens_over_a_socket(path: str, reply: list[int], shared: Running) -> None:
    """Any tokens, parts of characters among them: the stream's text is the whole answer's."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": len(reply), "ignore_eos": True}
    if path == COMPLETIONS:
        body["prompt"] = "x"
    elif path == "/v1/responses":
        body = {"model": MODEL, "input": "x", "max_output_tokens": max(16, len(reply)), "ignore_eos": True}
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    shared.engine.reply, shared.engine.interval = reply, 0.0005
    answer = shared.post(path, body)
    assert answer.status_code == 200, answer.text
    stream = shared.post(path, {**body, "stream": True})
    assert stream.status_code == 200, stream.text
    shared.engine.received.clear()  # hypothesis shows what an example is given
    assert streamed(read(stream.content)) == answered(answer.json())


def answered(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if "content" in answer:
        return "".join(part["text"] for part in answer["content"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def streamed(events: list[tuple[str, str]]) -> str:
    text = ""
    for kind, data in events:
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if kind == "message":
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        elif kind == "response.output_text.delta":
            text += event["delta"]
        elif kind == "content_block_delta":
            text += event["delta"]["text"]
    return text
