"""What clients say to the server stays between the two: neither its log nor another answer holds a word of it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEYS = ("canary-key-a71", "canary-key-b72")
CANARY = re.compile(r"canary-[a-z0-9-]+")
PATHS = re.compile(r"/(?:usr|home|root|tmp|opt|work|var|lib|site-packages)\b|\.py\b|0x[0-9a-f]{6,}|Traceback")


@pytest.fixture(scope="module")
def server() -> Iterator[Daemon]:
    """As talkative as it can be."""
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    flags = ("--max-num-seqs", "4", "--max-model-len", "1024", "--kv-cache-memory", "64MiB", "--log-level", "debug")
    with serve(*keys, *flags) as daemon:
        yield daemon


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def says(place: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"My word is canary-{place}."}]


CALL = {"id": "canary-call-id", "type": "function", "function": {"name": "f", "arguments": '{"a": "canary-arguments"}'}}
BODIES: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": "My word is canary-prompt."}),
    (COMPLETIONS, {"prompt": "canary-stream", "stream": True}),
    (COMPLETIONS, {"prompt": "x", "stop": ["canary-stop"], "user": "canary-user", "cache_salt": "canary-salt"}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "canary-regex[0-9]"}}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "canary-bad-regex["}}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"grammar": 'start: "canary-grammar" nothing'}}),
    (COMPLETIONS, {"prompt": "canary-beyond " * 2000}),
    (COMPLETIONS, {"prompt": "x", "temperature": "canary-temperature"}),
    (COMPLETIONS, {"prompt": "x", "unknown_field": "canary-value"}),  # its name is logged, once
    (COMPLETIONS, {"prompt": {"canary-object": 1}}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"canary-bias": 1}}),
    (COMPLETIONS, {"prompt": "x", "model": "canary-model"}),
    (CHAT, {"messages": says("content"), "metadata": {"a": "canary-metadata"}}),
    (CHAT, {"messages": says("tools"), "tools": [tool("f", "canary-description")], "tool_choice": "required"}),
    (CHAT, {"messages": [*says("call"), {"role": "assistant", "tool_calls": [CALL]}], "tools": [tool("f", "")]}),
    (CHAT, {"messages": says("schema"), "response_format": form({"const": "canary-const"})}),
    (CHAT, {"messages": says("schema2"), "response_format": form({"type": "canary-type"})}),
    (CHAT, {"messages": says("ref"), "response_format": form({"$ref": "#/canary-ref"})}),
    (CHAT, {"messages": [{"role": "canary-role", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "canary-part"}]}]}),
    (CHAT, {"messages": says("kwargs"), "chat_template_kwargs": {"canary-kwarg": 1}}),
    (CHAT, {"messages": says("template"), "chat_template": "{{ canary-template }}"}),
    ("/v1/responses", {"input": "canary-input", "instructions": "canary-instructions", "max_output_tokens": 16}),
    ("/v1/messages", {"messages": says("message"), "system": "canary-system", "max_tokens": 4}),
    ("/v1/embeddings", {"input": "canary-embedded"}),
    ("/tokenize", {"prompt": "canary-tokenize"}),
    (COMPLETIONS, b'{"prompt": "canary-broken'),
    (COMPLETIONS, b'{"prompt": "canary-surrogate \\ud83d"}'),
    (COMPLETIONS, b'{"prompt": "canary-latin \xff"}'),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN, "user": "canary-nan"}'),
    (COMPLETIONS, b'["canary-list"]'),
]
RAW = [
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\ncanary-header-name\r\n\r\n",
    b"canary-method / HTTP/9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\ncanary-chunk\r\n",
]
HEADERS: list[dict[str, str]] = [
    {"authorization": "Bearer canary-wrong-bearer"},
    {"authorization": "Basic canary-basic"},
    {"x-api-key": "canary-wrong-x-api-key"},
    {"x-api-key": KEYS[0] + "0", "cookie": "canary-cookie", "user-agent": "canary-agent", "x-other": "canary-other"},
]


def test_canaries_are_heard_nowhere(server: Daemon) -> None:
    """Not even in the answer to who said it, but for the model's own words and the field at fault; nor is a file."""
    heard: list[str] = []

    def listen(label: str, text: str, own: str = "") -> None:
        heard.extend(f"{label}: {word}" for word in set(CANARY.findall(text)) if word not in own)

    with httpx.Client(base_url=server.url, timeout=60, headers={"x-api-key": KEYS[0]}) as client:
        for path, body in BODIES:
            small = {"max_tokens": 4} if path in (COMPLETIONS, CHAT) else {}
            content = body if isinstance(body, bytes) else json.dumps(body | small).encode()
            headers = {"content-type": "application/json", "x-canary-name": "canary-header", "cookie": "canary-cookie"}
            reply = client.post(f"{path}?canary-query=canary-query-value", content=content, headers=headers)
            assert reply.status_code in (200, 400, 404, 422), reply.text
            listen(f"{path} {reply.status_code}", reply.text, content.decode(errors="replace"))
            assert KEYS[0] not in reply.text
            if reply.status_code != 200:
                assert not PATHS.search(reply.json()["error"]["message"]), reply.text
        for headers in HEADERS:
            reply = httpx.post(server.url + COMPLETIONS, json={"prompt": "canary-unheard"}, headers=headers)
            assert reply.status_code == 401
            listen("401", reply.text)
        for raw in RAW:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
                sock.sendall(raw)
                listen("400", sock.recv(4096).decode())
    with httpx.Client(base_url=server.url, timeout=60, headers={"x-api-key": KEYS[1]}) as client:
        for path in ("/metrics", "/v1/models", "/health", "/ready", "/version", "/openapi.json", "/docs"):
            reply = client.get(path)
            assert reply.status_code == 200
            listen(path, reply.text)
        reply = client.post(COMPLETIONS, json={"prompt": "My word is", "max_tokens": 20, "temperature": 0})
        listen("another key's answer", reply.text)
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    log = server.log.read_text()
    assert log.count(" POST ") + log.count("POST /") >= len(BODIES)
    listen("the log", log)
    assert "Traceback" not in log
    assert not heard, "\n".join(heard)
