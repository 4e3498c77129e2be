from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from server.middleware import OPEN_PATHS
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running

KEYS = ["first-key", "second-key"]


def test_errors_have_one_shape(server: Running) -> None:
    for reply, status, code in (
        (server.post(COMPLETIONS, b"{"), 400, "invalid_json"),
        (server.post(COMPLETIONS, b"[]"), 400, "invalid_value"),
        (server.post(COMPLETIONS, {"prompt": "x", "model": "nope"}), 404, "model_not_found"),
        (server.post("/v1/nothing", {}), 404, "not_found"),
        (server.client.get(COMPLETIONS), 405, "method_not_allowed"),
        (server.client.post(COMPLETIONS, content=b"prompt=x", headers={"content-type": "text/plain"}), 415, None),
    ):
        assert reply.status_code == status, reply.text
        assert reply.headers["content-type"] == "application/json"
        error = reply.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == code or code is None
        assert reply.headers["x-request-id"]
    assert server.client.get(COMPLETIONS).headers["allow"] == "OPTIONS, POST"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, OPTIONS"),
        ("/v1/models/a/b", "GET, OPTIONS"),
        (CHAT, "OPTIONS, POST"),
        ("/health", None),
        ("/openapi.json", None),
    ],
)
def test_options(server: Running, path: str, allowed: str | None) -> None:
    reply = server.client.options(path)
    assert (reply.status_code, reply.content) == (204, b"")
    assert reply.headers["allow"] == (allowed or "GET, HEAD, OPTIONS")
    assert server.client.options("/v1/nothing").status_code == 404


def test_an_unforeseen_failure_tells_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret at /some/path")

    monkeypatch.setattr("server.sampling.Sampling.params", broken)
    reply = server.complete()
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"]
    monkeypatch.undo()
    assert server.complete().status_code == 200


def test_an_unforeseen_failure_in_a_stream_ends_it_properly(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("server.sse.Frames.text", broken)
    chunks = server.stream(COMPLETIONS, prompt="x", max_tokens=50)
    assert chunks[0]["error"]["code"] == "internal_error"
    assert chunks[1:] == ["[DONE]"]


def test_bodies_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.body.MAX_BODY_BYTES", 1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    headers = {"content-type": "application/json"}
    declared = server.client.post(COMPLETIONS, content=body, headers=headers)
    chunked = server.client.post(COMPLETIONS, content=iter([body[:600], body[600:]]), headers=headers)
    for reply in (declared, chunked):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "payload_too_large"
    assert server.complete().status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://{host}"}, 200),
        ({"origin": "http://{host}", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 415),
        ({"origin": "null"}, 415),
        ({"sec-fetch-site": "cross-site"}, 415),
        ({"sec-fetch-site": "same-site", "origin": "http://{host}"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json", "origin": "http://evil.example"}, 200),
    ],
)
def test_a_web_page_of_another_origin_has_to_name_the_type(
    server: Running, headers: dict[str, str], status: int
) -> None:
    """Its browser then asks the server first. Programs that send neither a type nor an origin are served."""
    host = f"127.0.0.1:{server.port}"
    sent = {name: value.format(host=host) for name, value in headers.items()}
    for path, body in ((COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}'), ("/tokenize", b'{"prompt": "x"}')):
        assert server.client.post(path, content=body, headers=sent).status_code == status


def beginning(path: str, body: bytes, length: int) -> bytes:
    """A request that ends within its body."""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body


PATHS = [COMPLETIONS, CHAT, "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_body_is_read_in_vain(smol: Tokenizer, path: str) -> None:
    """Where the server is full or leaving, it says so before the body has come."""
    with running(smol, max_num_seqs=1, max_queued_requests=0) as server:

        def answered(status: int) -> bool:
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
                sock.sendall(beginning(path, b"{", 100))
                return sock.recv(100).startswith(b"HTTP/1.1 %d" % status)

        server.call(lambda: server.service.admission.reserve(1))
        assert answered(429)
        server.call(lambda: server.service.admission.release(1))
        server.service.draining = True
        assert answered(503)


def test_bodies_in_flight_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.admission.MAX_BODY_BYTES", 1000)
    server.engine.interval = 0.05
    admission = server.service.admission
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "user": "u" * 600}
    with server.client.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        assert 600 < admission.body_bytes < 800  # until the request has ended, not only until the body is read
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(beginning(COMPLETIONS, b"{" * 100, 600))
            server.wait(lambda: admission.body_bytes > 700)
            refused = server.complete(user="u" * 250)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert server.metric("octavo_rejected_total", reason="max_body_bytes") == 1
            assert server.complete().status_code == 200
    server.wait(lambda: admission.body_bytes == 0)


def test_a_body_that_trickles_in(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.body.READ_SECONDS", 0.2)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(head.encode() + b'{"prompt"')
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br, gzip", 415)])
def test_bodies_are_not_compressed(server: Running, encoding: str, status: int) -> None:
    reply = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **{"content-encoding": encoding})
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize("given", ["mine-1", "a b", None, "", "x" * 128, "x" * 129, "t\tb"])
def test_request_ids(server: Running, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    answered = server.client.get("/version", headers=headers).headers["x-request-id"]
    assert (answered == given) == (given in ("mine-1", "a b", "x" * 128))
    assert 1 <= len(answered) <= 128


def test_a_large_body_does_not_hold_up_the_probes(server: Running) -> None:
    """Ten megabytes are refused from their size, before anything is tokenised."""
    reply = server.complete(prompt="lorem ipsum " * 870_000)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert reply.elapsed.total_seconds() < 5


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


def test_openapi_has_the_whole_requests(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "stream", "top_logprobs"} <= set(schemas["ChatRequest"]["properties"])
    assert "prompt" in schemas["CompletionRequest"]["required"]
    text = json.dumps(document)
    references = {piece.split('"')[0] for piece in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert {("post", COMPLETIONS), ("get", "/v1/models"), ("get", "/health")} <= set(operations(document))
    assert server.client.get("/docs").status_code == 200


def test_every_route_wants_the_key(smol: Tokenizer) -> None:
    with running(smol, api_key=KEYS) as server:
        good = {"authorization": "Bearer second-key"}
        document = server.client.get("/openapi.json", headers=good).json()
        others = [
            ("get", "/openapi.json"),
            ("get", "/docs"),
            ("post", "/v1/tokenize"),
            ("get", "/nowhere"),
            ("post", "/"),
        ]
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer first-ke"},
            {"authorization": "Basic first-key"},
            {"authorization": "first-key"},
            {"authorization": "Bearer"},
            {"x-api-key": "wrong"},
            {"authorization": "Bearer wrong", "x-api-key": "first-key"},
            {"host": "x/health?"},
            {"host": "127.0.0.1/ready?a="},
        ]
        for method, path in [*operations(document), *others]:
            for headers in wrong:
                reply = server.client.request(method, path.replace("{id}", MODEL), headers=headers)
                if path in OPEN_PATHS or path == "/metrics":
                    assert reply.status_code == 200
                else:
                    assert reply.status_code == 401, f"{method} {path} {headers}: {reply.status_code}"
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.json()["error"]["code"] == "invalid_api_key"
        for headers in (good, {"authorization": "bearer first-key"}, {"x-api-key": "first-key"}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
            assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **headers).status_code == 200
        for path in ("//health", "/health/../v1/models", "/v1/models?/health", "/health%2f..%2fv1/models"):
            raw = raw_status(server, path)
            assert raw in (200, 401, 404)
            assert raw == 401 or path == "//health"


def raw_status(server: Running, target: str) -> int:
    """The status of a GET whose target no client has tidied."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return int(sock.recv(64).split()[1])


def test_metrics_may_want_the_key_too(smol: Tokenizer) -> None:
    with running(smol, api_key=["k"], protect_metrics=True) as server:
        assert server.client.get("/metrics").status_code == 401
        assert server.client.get("/metrics", headers={"x-api-key": "k"}).status_code == 200


def test_keys_and_salts_part_the_prefix_cache(smol: Tokenizer) -> None:
    with running(smol, api_key=KEYS) as server:
        body = {"prompt": "x", "max_tokens": 1}
        for key, salt in (("first-key", None), ("second-key", None), ("first-key", "s"), ("first-key", None)):
            server.post(COMPLETIONS, {**body, "cache_salt": salt, "user": "u"}, **{"x-api-key": key})
        first, second, salted, again = server.engine.submits()
        assert len({first.salt, second.salt, salted.salt}) == 3
        assert again.salt == first.salt
        assert first.tenant == salted.tenant != second.tenant
        assert b"first-key" not in first.salt
    with running(smol) as server:
        server.post(COMPLETIONS, {**body, "user": "u"})
        assert (server.engine.submits()[0].salt, server.engine.submits()[0].tenant) == (b"", "u")


def test_neither_keys_nor_prompts_are_logged(smol: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with running(smol, api_key=["very-secret"]) as server:
        body = {"prompt": "my diary", "max_tokens": 1, "odd_field": 1}
        server.post(COMPLETIONS, body, **{"x-api-key": "very-secret"})
        server.post(COMPLETIONS, {"prompt": "my diary"}, authorization="Bearer very-secret-too")
        server.client.get("/v1/models/%C3%A9%0A", headers={"x-api-key": "very-secret"})
    assert "very-secret" not in caplog.text
    assert "diary" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.access"]
    assert any(line.startswith("POST /v1/completions 200 ") for line in lines)
    assert any(line.startswith("POST /v1/completions 401 ") for line in lines)
    assert all("\n" not in line and line.isascii() for line in lines)
