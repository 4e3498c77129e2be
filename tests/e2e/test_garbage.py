"""Garbage in, a clear 4xx out; and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import MODEL, Daemon, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}

FAULTS: list[tuple[str, str, Any, int, str]] = [
    ("broken JSON", CHAT, b"{", 400, "JSON"),
    ("not UTF-8", CHAT, b'{"messages": "\xff"}', 400, "JSON"),
    ("a list", CHAT, b"[]", 400, "object"),
    ("NaN", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, "NaN"),
    ("Infinity", COMPLETIONS, b'{"prompt": "x", "top_p": Infinity}', 400, "Infinity"),
    ("huge float", COMPLETIONS, {"prompt": "x", "temperature": 1e308}, 400, "temperature"),
    ("negative temperature", CHAT, {"messages": HI, "temperature": -1}, 400, "temperature"),
    ("string for a number", COMPLETIONS, {"prompt": "x", "max_tokens": "10"}, 400, "max_tokens"),
    ("bool for a number", COMPLETIONS, {"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ("huge max_tokens", COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, 400, "max_tokens"),
    ("huge n", COMPLETIONS, {"prompt": "x", "n": 10**9}, 400, "n"),
    ("top_p of 0", COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p"),
    ("string for stream", COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ("logprobs as text", COMPLETIONS, {"prompt": "x", "logprobs": "5"}, 400, "logprobs"),
    ("too many top_logprobs", CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 10**5}, 400, "top_logprobs"),
    ("empty stop", COMPLETIONS, {"prompt": "x", "stop": ""}, 400, "stop"),
    ("too many stops", COMPLETIONS, {"prompt": "x", "stop": [str(i) for i in range(65)]}, 400, "stop"),
    ("bias of an unknown id", COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ("bias of no id", COMPLETIONS, {"prompt": "x", "logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ("negative token", COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    ("token beyond the vocabulary", COMPLETIONS, {"prompt": [2**40]}, 400, "prompt"),
    ("tokens mixed with text", COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
    ("lone surrogate", COMPLETIONS, rb'{"prompt": "x\ud83d"}', 400, "prompt"),
    ("unknown model", CHAT, {"messages": HI, "model": "nope"}, 404, "nope"),
    ("no messages", CHAT, {}, 400, "messages"),
    ("empty messages", CHAT, {"messages": []}, 400, "messages"),
    ("unknown role", CHAT, {"messages": [{"role": "ghost", "content": "x"}]}, 400, "role"),
    ("image", CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "image_url"),
    ("unsupported field", CHAT, {"messages": HI, "audio": {"format": "wav", "voice": "x"}}, 400, "audio"),
    ("prompt beyond the context", COMPLETIONS, {"prompt": "word " * 3000}, 400, "2048"),
    ("tokens beyond the context", COMPLETIONS, {"prompt": [5] * 2048, "max_tokens": 1}, 400, "2048"),
    ("prompt beyond the pool", COMPLETIONS, {"prompt": [5] * 1500, "max_tokens": 1}, 400, "block"),
    ("ten megabytes", COMPLETIONS, {"prompt": "lorem ipsum " * 870_000}, 400, "prompt"),
    ("unknown route", "/v1/nothing", {}, 404, "/v1/nothing"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    """A context of 2,048 tokens over a pool of 1,024."""
    with serve("--max-model-len", "2048", "--kv-cache-memory", str(65 * 16 * 23_040)) as daemon:
        yield daemon


def test_garbage_is_refused_and_a_bystander_streams_on(small: Daemon) -> None:
    """One client streams; another sends every fault. Each gets its 4xx; the stream is what it would have been."""
    request = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(small.url + COMPLETIONS, json=request, timeout=120).json()["choices"][0]["text"]
    wrong: list[str] = []
    pieces: list[str] = []
    with (
        httpx.Client(base_url=small.url, timeout=120) as client,
        client.stream("POST", COMPLETIONS, json={**request, "stream": True}) as stream,
    ):
        lines = (line for line in stream.iter_lines() if line)
        pieces.append(next(lines))
        for label, path, body, status, named in FAULTS:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = client.post(path, content=raw, headers={"content-type": "application/json"})
            error = reply.json().get("error", {})
            if reply.status_code != status or named not in error.get("message", ""):
                wrong.append(f"{label}: {reply.status_code} {reply.text[:300]}")
            if set(error) < {"message", "type", "param", "code"}:
                wrong.append(f"{label}: keys {sorted(error)}")
            assert client.get("/health").status_code == 200, label
        pieces += lines
    assert not wrong, "\n".join(wrong)
    assert pieces[-1] == "data: [DONE]"
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
    small.wait(small.at_rest, 1, "blocks freed")
