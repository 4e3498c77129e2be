"""Connections: how requests begin and end on the wire, and what is no HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest

from model.tokenizer import Tokenizer
from server.connection import LINGER_SECONDS, Connection
from tests.server.running import COMPLETIONS, Running, running


@pytest.mark.parametrize("beginning", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    """On a new connection, and on one that has served a request."""
    monkeypatch.setattr("server.connection.HEAD_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(beginning)
        assert sock.recv(100) == b""
    if beginning:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(beginning + b"\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            sock.sendall(beginning)
            assert sock.recv(100) == b""


def test_a_long_answer_is_no_slow_head(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.connection.HEAD_SECONDS", 0.1)
    server.engine.interval = 0.02
    with httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 20}).status_code == 200


def test_a_client_that_hangs_up_within_its_body(server: Running) -> None:
    gone = server.metric("octavo_client_disconnects_total")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(head.encode() + b'{"prompt"')
    server.wait(lambda: server.metric("octavo_client_disconnects_total") == gone + 1)


def request(body: dict[str, Any], *lines: str) -> bytes:
    """A whole POST of a completion."""
    content = json.dumps(body).encode()
    head = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content


def rest(sock: socket.socket) -> bytes:
    """Everything until the other end closes."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_ends_its_own_side_is_answered(server: Running, stream: bool) -> None:
    """Before the answer has begun, and within a stream."""
    server.engine.interval = 0.01
    sent = request({"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": stream})
    whole = []
    for late in (False, True):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(sent)
            begun = sock.recv(65536) if late and stream else b""
            sock.shutdown(socket.SHUT_WR)
            whole.append(begun + rest(sock))
    for answer in whole:
        assert b"HTTP/1.1 200" in answer
        assert b"data: [DONE]" in answer if stream else b'"usage"' in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_noticed_before_a_token_came(server: Running, stream: bool) -> None:
    gone = server.metric("octavo_client_disconnects_total")
    server.engine.paused.set()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(request({"prompt": "x", "max_tokens": 60, "stream": stream}))
        server.wait(lambda: server.service.admission.requests == 1)
    server.wait(lambda: server.metric("octavo_client_disconnects_total") == gone + 1)


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_what_is_no_http_is_refused_like_all_else(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Any number of such requests is a line every now and then."""
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(b"hello\r\n\r\n")
            error = error_of(rest(sock))
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert len([record for record in caplog.records if "alformed" in record.message]) <= 1
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_two_lengths_are_one_too_many(server: Running) -> None:
    """What one reader takes for the body, another takes for the next request."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(head.encode() + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert error_of(rest(sock))["message"].startswith("content-length: ")


def test_a_body_in_broken_chunks_is_no_fault_of_the_server(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(head.encode() + b"no length\r\n")
        assert error_of(rest(sock))["code"] == "invalid_http"
    assert not [record for record in caplog.records if record.exc_info]


def test_an_upgrade_is_ignored_without_advice(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert server.client.get("/health", headers=headers).status_code == 200
    assert "uvicorn" not in caplog.text


def test_headers_are_bounded(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"i" * (1 << 20) + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    assert server.client.get("/health").status_code == 200


def test_clients_without_keep_alive(server: Running) -> None:
    with httpx.Client(base_url=server.url, headers={"connection": "close"}) as client:
        reply = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True})
    assert reply.text.endswith("data: [DONE]\n\n")


def test_requests_in_a_row_are_answered_in_a_row(server: Running) -> None:
    """Pipelined, behind a stream too: nothing is mixed up, nothing is lost."""
    probe = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(probe + request({"prompt": "x", "max_tokens": 5, "stream": True}) + probe + last)
        answers = rest(sock)
    first, stream, third, fourth = answers.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b'{"status":"ready"}')
    assert third.endswith(b'{"status":"ready"}')
    assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"version"' in fourth


SMUGGLED = b"GET /version HTTP/1.1\r\nHost: smuggled\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5_0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"X: a\x00b\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_where_a_request_ends_is_no_matter_of_opinion(
    server: Running, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """One refusal, and the end: what follows is never taken for a request."""
    monkeypatch.setattr("server.connection.HEAD_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode() + head + b"\r\n0\r\n\r\n" + SMUGGLED)
        answer = rest(sock)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"version"' not in answer


@pytest.mark.parametrize(
    "line",
    [
        b"GET /health\r\n",
        b"GET  /health HTTP/1.1\r\n",
        b"GET /health HTTP/2.0\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
    ],
)
def test_other_protocols(server: Running, line: bytes) -> None:
    """HTTP/0.9, HTTP/2 without TLS, TLS, and what only looks like HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(line + b"Host: x\r\n\r\n")
        assert error_of(rest(sock))["code"] == "invalid_http"


TARGETS = [
    "http://127.0.0.1/health",
    "http://x/v1/models",
    "/v1/models#/health",
    "/v1/models;/health",
    "/health;/../v1/models",
    "/./v1/models",
    "/health%00",
    "/%2e%2e/health",
    "/HEALTH",
    "\\health",
    "*",
    "x/health",
]


@pytest.mark.parametrize("target", TARGETS)
def test_strange_targets_need_the_key_as_well(keyed: Running, target: str) -> None:
    for host in ("x", "x/health?", "x:8000/health#", "x\\@y"):
        with socket.create_connection(("127.0.0.1", keyed.port), timeout=5) as sock:
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert rest(sock).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))


@pytest.fixture(scope="module")
def keyed(smol: Tokenizer) -> Iterator[Running]:
    with running(smol, api_key=["key"]) as server:
        yield server


def test_what_is_written_goes_out_at_once(server: Running) -> None:
    """And does not wait for what was written before it to be acknowledged."""
    connections = server.service.connections
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        server.wait(lambda: bool(connections._asking))
        for one in connections._asking:
            sock = cast(Connection, one).transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---- who is refused while it is still sending ----

POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
LENGTH = b"Content-Length: 8000000\r\n\r\n"
LAST = b"Connection: close\r\n"


def drained(server: Running) -> None:
    server.service.draining = True


def full(server: Running) -> None:
    server.service.admission.sequences += 10**6


REFUSED: dict[str, tuple[bytes, int, Callable[[Running], None]]] = {
    "draining": (POST + LENGTH, 503, drained),
    "full": (POST + LAST + LENGTH, 429, full),
    "wrong key": (POST + LAST + b"Authorization: Bearer wrong\r\n" + LENGTH, 401, lambda server: None),
    "large body": (POST + LAST + b"Content-Length: 80000000\r\n\r\n", 413, lambda server: None),
    "two lengths": (POST + LAST + b"Transfer-Encoding: chunked\r\n" + LENGTH, 400, lambda server: None),
    "no length": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400, lambda server: None),
    "large head": (POST + b"X: " + b"a" * 2**17, 400, lambda server: None),
}


@pytest.mark.parametrize(("head", "status", "prepare"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_read_whole_by_who_is_still_sending(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, head: bytes, status: int, prepare: Callable[[Running], None]
) -> None:
    """And at its end the connection: neither is lost to a reset."""
    monkeypatch.setattr("server.connection.LINGER_SECONDS", 10)
    service = keyed.service
    sequences = service.admission.sequences
    prepare(keyed)
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=10) as sock:
        key = b"" if b"Authorization" in head else b"Authorization: Bearer key\r\n"
        sock.sendall(head.replace(b"Host: x\r\n", b"Host: x\r\n" + key))
        answer = sock.recv(1)
        for _ in range(100):
            sock.sendall(b"a" * 2**16)
        answer += rest(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    service.draining, service.admission.sequences = False, sequences
    keyed.wait(lambda: service.connections.count == 0, LINGER_SECONDS)  # it went with the client


@pytest.mark.parametrize("piece", [b"a", b"a" * 2**16], ids=["slowly", "without an end"])
def test_who_goes_on_sending_after_its_last_answer_is_hung_up_on(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr("server.connection.LINGER_SECONDS", 0.3 if len(piece) == 1 else 60)
    monkeypatch.setattr("server.connection.LINGER_BYTES", 2**20)
    connections = keyed.service.connections
    keyed.wait(lambda: connections.count == 0)
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=10) as sock:
        sock.sendall(POST + LAST + b"Content-Length: 80000000\r\n\r\n")
        assert rest(sock).startswith(b"HTTP/1.1 401 ")
        assert connections.count == 1
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                sock.sendall(piece)
        assert time.monotonic() - began < 5
    keyed.wait(lambda: connections.count == 0)
