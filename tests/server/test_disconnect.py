"""Clients that leave at moments that are easily forgotten: within a second nothing is left of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running
from tests.server.test_generation import at_rest, connection

LONG = {"max_tokens": 900, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello there"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello there", **LONG},
    CHAT: {"messages": MESSAGES, **LONG},
    "/v1/responses": {"input": "hello there"},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 900},
    "/v1/embeddings": {"input": "hello there"},
}


STREAMED = [(path, stream) for path in BODIES for stream in (False, True) if not stream or path != "/v1/embeddings"]


@pytest.mark.parametrize(("path", "stream"), STREAMED)
def test_while_its_prompt_is_tokenised(
    server: Running, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """The thread goes on, for no thread can be stopped; nobody waits for it, and the engine never hears of it."""
    begun, go_on = threading.Event(), threading.Event()
    encode = smol.encode

    def slow(*given: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return encode(*given, **options)

    monkeypatch.setattr(smol, "encode", slow)
    body = BODIES[path] | ({"stream": True} if stream else {})
    try:
        with connection(server, path, body):
            assert begun.wait(5)
            assert server.service.admission.requests == 1
        server.wait(lambda: server.service.admission.requests == 0, 1.0)
    finally:
        go_on.set()
    monkeypatch.undo()
    assert server.complete().status_code == 200
    assert len(server.engine.submits()) == 1


@pytest.mark.parametrize("path", BODIES)
def test_while_it_waits_or_its_prompt_is_computed(server: Running, path: str) -> None:
    server.engine.paused.set()
    with connection(server, path, BODIES[path]):
        server.engine.wait_for(lambda engine: engine.submits() != [])
    server.engine.wait_for(lambda engine: engine.aborts() != [] and not engine.sequences, 1.0)
    server.wait(lambda: at_rest(server), 1.0)


def test_two_of_one_name(server: Running) -> None:
    """Request ids are the clients' words: two may be the same, and counting them never fails."""
    server.engine.interval = 0.01
    aborts = server.metric("octavo_requests_total", finish_reason="abort")
    body = BODIES[COMPLETIONS] | {"stream": True, "request_id": "same"}
    with connection(server, COMPLETIONS, body), connection(server, COMPLETIONS, body):
        server.engine.wait_for(lambda engine: sum(len(s.tokens) > 3 for s in engine.sequences) == 2)
    server.wait(lambda: at_rest(server), 1.0)
    assert server.metric("octavo_requests_total", finish_reason="abort") == aborts + 2
    assert server.metric("octavo_generation_tokens_total") == server.metric("octavo_request_generation_tokens_sum")


def test_behind_the_head_of_a_stream_and_before_its_first_token(server: Running) -> None:
    """Whoever has read all there is leaves no trace on the wire but the end of what it sends."""
    server.engine.paused.set()
    with connection(server, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True}) as sock:
        server.engine.wait_for(lambda engine: engine.submits() != [])
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
    server.engine.wait_for(lambda engine: engine.aborts() != [] and not engine.sequences, 1.0)
    server.wait(lambda: at_rest(server), 1.0)
