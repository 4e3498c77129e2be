"""Limits of keys over real sockets: what is refused, what every answer says, and what the SDK makes of it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model.tokenizer import Tokenizer
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running

LIMITS = {
    "alice": {"requests_per_minute": 3, "tokens_per_minute": 2000},
    "bob": {"max_concurrency": 2},
    "carol": {"tokens_per_minute": 1000},
    "dave": {},
}
HI = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture
def limited(tmp_path: Path, smol: Tokenizer) -> Iterator[Running]:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": name, "key": name, **limits} for name, limits in LIMITS.items()]}))
    with running(smol, api_keys_file=file, max_num_seqs=8) as server:
        yield server


def ask(server: Running, key: str, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": HI}
    return server.post(path, {**body, "max_tokens": 4, **fields}, authorization=f"Bearer {key}")


@contextlib.contextmanager
def streaming(server: Running, key: str, **fields: Any) -> Iterator[httpx.Response]:
    """A stream that has begun."""
    headers = {"authorization": f"Bearer {key}"}
    with server.client.stream("POST", COMPLETIONS, json={**LONG, **fields}, headers=headers) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        yield reply


def left(reply: httpx.Response, kind: str) -> int:
    return int(reply.headers[f"x-ratelimit-remaining-{kind}"])


def test_every_answer_says_what_is_left(limited: Running) -> None:
    first = ask(limited, "alice")
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-limit-tokens"] == "2000"
    assert left(first, "requests") == 2
    assert left(first, "tokens") == 2000 - 5
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
    stream = limited.post(CHAT, {"messages": HI, "max_tokens": 4, "stream": True}, authorization="Bearer alice")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert left(stream, "requests") == 1
    assert left(stream, "tokens") < 2000 - 5
    wrong = ask(limited, "alice", temperature=-1)
    assert (wrong.status_code, left(wrong, "requests")) == (400, 0)
    models = limited.client.get("/v1/models", headers={"x-api-key": "alice"})
    assert (models.status_code, left(models, "requests")) == (200, 0)
    assert not any(name.startswith("x-ratelimit") for name in ask(limited, "dave").headers)


def test_too_many_requests(limited: Running) -> None:
    for _ in range(3):
        assert ask(limited, "alice", max_tokens=1).status_code == 200
    for path in (COMPLETIONS, "/v1/messages", "/tokenize", "/v1/nothing"):
        refused = ask(limited, "alice", path)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert int(refused.headers["retry-after-ms"]) <= 20_000
        assert (left(refused, "requests"), refused.headers["x-ratelimit-limit-requests"]) == (0, "3")
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "3 requests a minute" in error["message"]
        assert refused.headers["x-request-id"]
    assert ask(limited, "dave").status_code == 200
    assert limited.metric("octavo_rejected_total", reason="requests_per_minute") == 4
    assert limited.metric("vllm:admission_rejections_total", reason="requests_per_minute") == 4
    limited.wait(lambda: limited.metric("octavo_http_requests_total", route=COMPLETIONS, status="200") == 4)


def test_who_is_over_the_limit_is_not_read(limited: Running) -> None:
    for _ in range(3):
        ask(limited, "alice", max_tokens=1)
    with socket.create_connection(("127.0.0.1", limited.port), timeout=5) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\nContent-Length: 100\r\n\r\n"
        sock.sendall(head.encode() + b"{")
        assert sock.recv(100).startswith(b"HTTP/1.1 429")


def test_tokens_are_reserved_for_a_stream_and_settled_at_its_end(limited: Running) -> None:
    limited.engine.interval = 0.01
    with streaming(limited, "carol", max_tokens=900) as stream:
        assert left(stream, "tokens") <= 1000 - 901
        refused = ask(limited, "carol", prompt=[5] * 300, max_tokens=1)
        assert refused.status_code == 429
        assert "1000 tokens a minute" in refused.json()["error"]["message"]
    limited.wait(lambda: limited.service.admission.requests == 0)
    again = ask(limited, "carol", prompt=[5] * 300, max_tokens=1)
    assert again.status_code == 200  # the stream was cut short
    assert limited.metric("octavo_rejected_total", reason="tokens_per_minute") == 1


def test_a_prompt_beyond_the_limit(limited: Running) -> None:
    for prompt in ([5] * 1001, [[5] * 600, [6] * 600]):
        refused = ask(limited, "carol", prompt=prompt, max_tokens=1)
        assert refused.status_code == 400
    assert refused.headers["x-should-retry"] == "false"
    error = refused.json()["error"]
    assert (error["code"], error["prompt_tokens"], error["tokens_per_minute"]) == (
        "tokens_per_minute_exceeded",
        1200,
        1000,
    )
    assert limited.service.admission.sequences == 0


def test_sequences_at_a_time(limited: Running) -> None:
    limited.engine.interval = 0.01
    assert ask(limited, "bob", n=2).status_code == 200
    never = ask(limited, "bob", n=3)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    assert never.headers["x-should-retry"] == "false"
    with streaming(limited, "bob"):
        assert ask(limited, "bob", n=2).status_code == 429
        assert ask(limited, "bob", CHAT).status_code == 200
        with streaming(limited, "bob"):
            refused = ask(limited, "bob", CHAT)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert ask(limited, "dave", n=4).status_code == 200
    limited.wait(lambda: limited.service.admission.requests == 0)
    limited.wait(lambda: ask(limited, "bob", n=2).status_code == 200)
    assert limited.metric("octavo_rejected_total", reason="max_concurrency") >= 2


def test_many_inputs_take_turns_within_the_limit(limited: Running) -> None:
    reply = limited.post("/v1/embeddings", {"input": ["a"] * 20}, authorization="Bearer bob")
    assert reply.status_code == 200
    assert len(reply.json()["data"]) == 20


def sdk_answers(server: Running, key: str, prompt: list[int]) -> None:
    """The SDK is refused once at least, and succeeds without its caller's knowledge."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=3) as sdk:
        answer = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert server.metric("octavo_http_requests_total", route=COMPLETIONS, status="200") >= 1
    assert server.metric("octavo_rejected_total") >= 1


def test_the_sdk_waits_for_tokens(limited: Running) -> None:
    assert ask(limited, "carol", prompt=[5] * 990, max_tokens=9).status_code == 200
    sdk_answers(limited, "carol", [5] * 10)


def test_the_sdk_waits_for_sequences(limited: Running) -> None:
    limited.engine.interval = 0.002
    with streaming(limited, "bob", n=2, max_tokens=300):
        sdk_answers(limited, "bob", [5])


def test_the_sdk_waits_for_a_slot(smol: Tokenizer) -> None:
    with running(smol, max_num_seqs=1, max_queued_requests=0) as server:
        server.engine.interval = 0.002
        with streaming(server, "nobody", max_tokens=300):
            sdk_answers(server, "nobody", [5])


def test_the_sdk_does_not_retry_what_can_never_be(limited: Running) -> None:
    with (
        openai.OpenAI(base_url=f"{limited.url}/v1", api_key="carol", max_retries=3) as sdk,
        pytest.raises(openai.BadRequestError),
    ):
        sdk.completions.create(model=MODEL, prompt=[5] * 1001, max_tokens=1)
    limited.wait(lambda: limited.metric("octavo_http_requests_total", route=COMPLETIONS, status="400") == 1)


def test_a_full_server_is_not_the_key_s_fault(tmp_path: Path, smol: Tokenizer) -> None:
    """A refusal by the server takes nothing from the key."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "alice", "key": "alice", "requests_per_minute": 2}]}))
    with running(smol, api_keys_file=file, max_num_seqs=1, max_queued_requests=0) as server:
        server.engine.interval = 0.01
        with streaming(server, "alice"):
            for _ in range(3):
                refused = ask(server, "alice")
                assert refused.json()["error"]["code"] == "server_overloaded"
                assert left(refused, "requests") == 1
        server.wait(lambda: server.service.admission.requests == 0)
        server.service.draining = True
        assert (ask(server, "alice").status_code, left(ask(server, "alice"), "requests")) == (503, 1)
        server.service.draining = False
        assert ask(server, "alice").status_code == 200
