from __future__ import annotations

import json
import socket

import openai
import pytest

from server import sse
from server.errors import EngineError
from server.sse import DONE, Frames, error_frames
from tests.server.running import COMPLETIONS, MODEL, Running, events


def test_frames() -> None:
    fixed = {"id": 'a"\n', "created": 5}
    frames = Frames(fixed, null_usage=False)
    assert frames.chunk(b'{"index":0}') == b'data: {"id":"a\\"\\n","created":5,"choices":[{"index":0}]}\n\n'
    assert Frames(fixed, null_usage=True).chunk(b"1").endswith(b'"choices":[1],"usage":null}\n\n')
    (last,) = events(frames.with_usage(b"", {"total_tokens": 3}).decode())
    assert last == {**fixed, "choices": [], "usage": {"total_tokens": 3}}


def test_an_error_is_an_event_and_then_the_end() -> None:
    frames = error_frames(EngineError('it said "no"\nand left'))
    assert frames.endswith(DONE)
    event, done = events(frames.decode())
    assert event["error"]["message"] == 'it said "no"\nand left'
    assert done == "[DONE]"


def test_comments_only_when_it_is_quiet(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused engine: comments come. A busy one: none. No `id:`, no empty `data:`; and the SDK reads on."""
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.2)
    server.engine.interval = 0.01
    busy = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 40, "stream": True}).text
    assert ":" not in {line[:1] for line in busy.splitlines()}

    body = {"prompt": "x", "max_tokens": 40, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        server.engine.paused.set()
        while (line := next(lines)) != ": keep-alive":
            assert line.startswith("data: ") or not line
        server.engine.paused.clear()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") or line == ": keep-alive" for line in rest[:-1])


def test_the_sdk_reads_over_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.01)
    server.engine.interval = 0.03
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=10, stream=True)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"


def test_a_client_that_reads_nothing_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the buffers between are full: then it is a client that has left."""
    monkeypatch.setattr(sse, "SEND_SECONDS", 0.3)
    monkeypatch.setattr(Frames, "text", lambda self, index, text: b"data: " + b" " * 100_000 + b"{}\n\n")
    gone = server.metric("octavo_client_disconnects_total")
    body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        server.wait(lambda: server.metric("octavo_client_disconnects_total") == gone + 1, 20)
        server.engine.wait_for(lambda engine: not engine.sequences)
    assert server.complete().status_code == 200
