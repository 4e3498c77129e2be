from __future__ import annotations

import json
import socket
from typing import Any

import h11
import openai
import orjson
import pytest

from server import sse
from server.errors import EngineError
from server.sse import DONE, TEXT, Frames, error_frames
from tests.server.running import COMPLETIONS, MODEL, Running, events


def test_frames() -> None:
    fixed = {"id": 'a"\n', "created": 5}
    frames = Frames(fixed, null_usage=False)
    assert frames.chunk(b'{"index":0}') == b'data: {"id":"a\\"\\n","created":5,"choices":[{"index":0}]}\n\n'
    assert Frames(fixed, null_usage=True).chunk(b"1").endswith(b'"choices":[1],"usage":null}\n\n')
    (last,) = events(frames.beside(b"", {"usage": {"total_tokens": 3}}).decode())
    assert last == {**fixed, "choices": [], "usage": {"total_tokens": 3}}


@pytest.mark.parametrize("text", ["plain", 'quo"ted\n', "\u2028 😀 \0text", ""])
def test_a_text_is_framed_as_its_choice_would_be(text: str) -> None:
    def choice(index: int, text: str = TEXT) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None}

    frames = Frames({"id": "a", "model": TEXT}, null_usage=True, shape=choice)
    for index in (0, 3, 0):
        assert frames.text(index, text) == frames.chunk(orjson.dumps(choice(index, text)))


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


def test_no_quiet_is_longer_than_proxies_bear() -> None:
    assert 0 < sse.QUIET_SECONDS <= 15


def test_the_sdk_reads_over_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.01)
    server.engine.interval = 0.03
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=10, stream=True)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"


def asked(server: Running, sock: socket.socket, version: str, max_tokens: int, n: int = 1) -> h11.Connection:
    """Send a request for a stream on a socket; the client's state."""
    sock.settimeout(20)
    sock.connect(("127.0.0.1", server.port))
    client = h11.Connection(h11.CLIENT)
    body = json.dumps({"prompt": "Once", "max_tokens": max_tokens, "n": n, "ignore_eos": True, "stream": True})
    headers = [("Host", "x"), ("Connection", "close"), ("Content-Length", str(len(body)))]
    head = client.send(h11.Request(method="POST", target=COMPLETIONS, headers=headers)) or b""
    client.send(h11.Data(data=body.encode()))
    client.send(h11.EndOfMessage())
    sock.sendall(head.replace(b"HTTP/1.1", b"HTTP/" + version.encode()) + body.encode())
    return client


def parts(client: h11.Connection, answer: bytes) -> list[bytes]:
    """The body, chunk by chunk."""
    client.receive_data(answer)
    client.receive_data(b"")
    chunks = [b""]
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            chunks[-1] += event.data
            if event.chunk_end:
                chunks.append(b"")
    return chunks if chunks[-1] else chunks[:-1]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_write_is_whole_events(server: Running, version: str) -> None:
    server.engine.interval = 0.005
    with socket.socket() as sock:
        client = asked(server, sock, version, 40)
        chunks = parts(client, b"".join(iter(lambda: sock.recv(1 << 16), b"")))
    assert (len(chunks) > 20) == (version == "1.1")
    for chunk in chunks:
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
    *told, last = events(b"".join(chunks).decode())
    assert last == "[DONE]"
    text = server.complete(max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == text


def test_a_step_is_one_write(server: Running) -> None:
    """Whatever it brings of all choices; and one more for the end."""
    server.engine.interval = 0.005
    before = server.engine.steps
    with socket.socket() as sock:
        client = asked(server, sock, "1.1", 40, n=3)
        chunks = parts(client, b"".join(iter(lambda: sock.recv(1 << 16), b"")))
    assert 20 < len(chunks) <= server.engine.steps - before + 1
    assert b"".join(chunks).count(b"data: ") > 2 * len(chunks)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_slow_client_is_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The engine goes on at its own pace; what comes meanwhile is merged, and nothing is lost."""

    def wide(frames: Frames, index: int, text: str) -> bytes:
        return b"data: " + b" " * 100_000 + orjson.dumps({"choices": [{"text": text}]}) + b"\n\n"

    whole = server.complete(max_tokens=400, ignore_eos=True).json()["choices"][0]["text"]
    server.engine.received.clear()
    monkeypatch.setattr(Frames, "text", wide)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client = asked(server, sock, version, 400)
        server.engine.wait_for(lambda engine: bool(engine.submits()) and not engine.sequences, 20)
        body = b"".join(parts(client, b"".join(iter(lambda: sock.recv(1 << 20), b""))))
    *told, last = events(body.decode())
    assert last == "[DONE]"
    assert len(told) < 390
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == whole
