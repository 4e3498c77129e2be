"""Clients that leave, deadlines, and full queues, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import httpx
import pytest

from model.tokenizer import Tokenizer
from server.streams import RequestStream, TextEvent
from tests.server.running import CHAT, COMPLETIONS, Running, running
from tests.server.running import events as sent

LONG = {"max_tokens": 900, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", **LONG},
    CHAT: {"messages": [{"role": "user", "content": "x"}], **LONG},
}


@contextmanager
def connection(server: Running, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a socket of its own; leaving the block hangs up."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head.encode() + content)
        yield sock


def at_rest(server: Running) -> bool:
    return (
        server.metric("octavo_requests_running") == 0
        and server.metric("octavo_requests_waiting") == 0
        and server.metric("octavo_kv_blocks", state="active") == 0
        and server.metric("octavo_requests_in_flight") == 0
    )


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(server: Running, path: str, stream: bool) -> None:
    """In the engine, within a second; and the gauges say so although nothing runs afterwards."""
    endpoint = path.split("/")[2]
    before = server.metric("octavo_requests_total", endpoint=endpoint, finish_reason="abort")
    gone = server.metric("octavo_client_disconnects_total")
    server.engine.interval = 0.01
    with connection(server, path, {**BODIES[path], "stream": stream}) as sock:
        server.engine.wait_for(lambda engine: any(len(s.tokens) > 3 for s in engine.sequences))
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    server.engine.wait_for(lambda engine: bool(engine.aborts()) and not engine.sequences, 1.0)
    assert [abort.id for abort in server.engine.aborts()] == [submit.id for submit in server.engine.submits()]
    server.wait(lambda: at_rest(server), 1.0)
    assert server.metric("octavo_requests_total", endpoint=endpoint, finish_reason="abort") == before + 1
    assert server.metric("octavo_client_disconnects_total") == gone + 1
    made = server.metric("octavo_generation_tokens_total")
    assert made == server.metric("octavo_request_generation_tokens_sum") > 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_or_the_prefill(server: Running, stream: bool) -> None:
    server.engine.paused.set()
    with connection(server, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": stream}):
        server.engine.wait_for(lambda engine: engine.submits() != [])
    server.engine.wait_for(lambda engine: engine.aborts() != [] and not engine.sequences, 1.0)
    server.wait(lambda: at_rest(server), 1.0)


def test_leaving_one_of_several_prompts(server: Running) -> None:
    server.engine.interval = 0.01
    with connection(server, COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True, "n": 2, **LONG}):
        server.engine.wait_for(lambda engine: len(engine.sequences) == 6)
    server.engine.wait_for(lambda engine: len(engine.aborts()) == 3 and not engine.sequences, 1.0)


def test_a_bystander_notices_nothing(server: Running) -> None:
    server.engine.interval = 0.002
    alone = server.complete(max_tokens=60).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        stays = pool.submit(server.stream, COMPLETIONS, prompt="Once", max_tokens=60)
        for _ in range(3):
            with connection(server, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True}) as sock:
                sock.recv(100)
    chunks = stays.result(20)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == alone


def test_same_request_ids_do_not_meet(server: Running) -> None:
    headers = {"x-request-id": "same"}
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": [i + 5], "max_tokens": i + 1, "request_id": "same"} for i in range(8)]
        replies = list(pool.map(lambda body: server.post(COMPLETIONS, body, **headers), bodies))
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == list(range(1, 9))
    assert {reply.headers["x-request-id"] for reply in replies} == {"same"}
    assert len({reply.json()["id"] for reply in replies}) == 8


def test_many_at_once_each_get_their_own(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=20, limits=httpx.Limits(max_connections=40)) as client:

        def ask(number: int) -> tuple[str, int]:
            fields = {"prompt": f"number {number} ", "max_tokens": 10 + number, "echo": True}
            if number % 2:
                whole = client.post(COMPLETIONS, json=fields).json()
                return whole["choices"][0]["text"], whole["usage"]["completion_tokens"]
            options = {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last, _ = sent(client.post(COMPLETIONS, json=fields | options).text)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            return text, last["usage"]["completion_tokens"]

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, range(32)))
    assert all(text.startswith(f"number {number} ") for number, (text, _) in enumerate(answers))
    assert [tokens for _, tokens in answers] == [10 + number for number in range(32)]


def test_full_is_429(smol: Tokenizer) -> None:
    """Running ones and queued ones stay; the rest is refused at once, with n counted, and told when to come back."""

    def one_at_a_time(engine: Any) -> None:
        engine.max_running = 1

    with running(smol, one_at_a_time, max_num_seqs=1, max_queued_requests=2) as server:
        server.engine.paused.set()
        with connection(server, COMPLETIONS, BODIES[COMPLETIONS]), connection(server, CHAT, BODIES[CHAT]):
            server.engine.wait_for(lambda engine: len(engine.submits()) == 2)
            refused = server.complete(n=2)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.json()["error"]["code"] == "server_overloaded"
            assert server.metric("octavo_rejected_total", reason="max_queued_requests") == 1
            assert server.metric("vllm:admission_rejections_total", reason="max_queued_requests") == 1
            with ThreadPoolExecutor(1) as pool:
                third = pool.submit(server.complete)
                server.engine.wait_for(lambda engine: len(engine.submits()) == 3)
                server.engine.paused.clear()
        assert third.result(10).status_code == 200
        assert server.complete().status_code == 200


def test_too_many_waiting_tokens_are_429(smol: Tokenizer) -> None:
    with running(smol, max_queued_tokens=100) as server:
        server.engine.paused.set()
        server.engine.max_running = 0
        with connection(server, COMPLETIONS, {"prompt": [5] * 90, "max_tokens": 4}):
            server.engine.wait_for(lambda engine: len(engine.submits()) == 1)
            assert server.complete(prompt=[5] * 11).status_code == 429
            assert server.metric("octavo_rejected_total", reason="max_queued_tokens") == 1
        server.engine.max_running = 8
        server.engine.paused.clear()
        server.wait(lambda: server.complete(prompt=[5] * 11).status_code == 200)


def test_a_list_of_prompts_is_no_way_around_that(smol: Tokenizer) -> None:
    with running(smol, max_queued_tokens=100) as server:
        error = server.complete(prompt=[[5] * 60, [5] * 60]).json()["error"]
        assert error["param"] == "prompt"
        assert "100 tokens" in error["message"]
        assert server.complete(prompt=[[5] * 60, [5] * 40]).status_code == 200
        assert server.complete(prompt=[5] * 900).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_an_admitted_request_is_served_though_the_server_drains(
    server: Running, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = smol.encode

    def slow(*given: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(5)
        return encode(*given, **options)

    monkeypatch.setattr(smol, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(server.post, path, BODIES[path] | {"max_tokens": 2})
        assert begun.wait(5)
        monkeypatch.setattr(server.service, "draining", True)
        assert server.post(path, BODIES[path]).status_code == 503
        go_on.set()
        assert admitted.result(5).status_code == 200


def test_whatever_one_stream_of_several_fails_with_ends_the_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = RequestStream.events

    async def broken(stream: RequestStream) -> AsyncGenerator[list[TextEvent], None]:
        async with aclosing(events(stream)) as batches:
            async for batch in batches:
                if stream.submit.prompt_ids == [6]:
                    raise ValueError("private")
                yield batch

    monkeypatch.setattr(RequestStream, "events", broken)
    with httpx.Client(base_url=server.url, timeout=5) as client:
        body = {"prompt": [[5], [6]], **LONG, "stream": True}
        *_, error, done = sent(client.post(COMPLETIONS, json=body).text)
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")


def test_the_time_limit_of_a_request(smol: Tokenizer) -> None:
    with running(smol, request_timeout=0.3) as server:
        server.engine.interval = 0.02
        reply = server.complete(**LONG)
        assert reply.status_code == 408
        assert reply.json()["error"]["type"] == "timeout_error"
        chunks = server.stream(COMPLETIONS, prompt="x", **LONG)
        assert len(chunks) > 3
        assert chunks[-2]["error"]["code"] == "timeout"
        assert chunks[-1] == "[DONE]"
        server.engine.wait_for(lambda engine: len(engine.aborts()) == 2 and not engine.sequences)
        server.wait(lambda: server.metric("vllm:request_success_total", finished_reason="error") == 2)
        assert server.complete().status_code == 200


def test_the_time_limit_of_the_queue(smol: Tokenizer) -> None:
    with running(smol, queue_timeout=0.2) as server:
        server.engine.interval = 0.02
        assert server.complete(max_tokens=20).status_code == 200  # it started in time, and may go on
        server.engine.max_running = 0
        reply = server.complete()
        assert reply.status_code == 408
        assert "did not start" in reply.json()["error"]["message"]
