"""Clients that send or read slowly, too much, or nothing at all: what they hold is bounded, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from model.tokenizer import Tokenizer
from server.connection import MAX_HEADERS, MAX_SMALL
from tests.server.running import COMPLETIONS, Running, events, running

POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def connected(server: Running, receive: int | None = None) -> Iterator[socket.socket]:
    """`receive`: bytes that the system keeps for the client; small ones make a client slow at once."""
    with socket.socket() as sock:
        if receive is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def rest(sock: socket.socket) -> bytes:
    """Everything until the other end closes, however it does."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            data += part
    return data


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def pour(sock: socket.socket, piece: bytes, times: int) -> int:
    """Send a piece again and again; the bytes that were taken before the other end hung up."""
    taken = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        for _ in range(times):
            sock.sendall(piece)
            taken += len(piece)
    return taken


def asking(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return POST + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


# ---- who sends slowly, or too much ----


@pytest.mark.parametrize("beginning", [b"GET /health HTTP/1.1\r\nX: ", CHUNKED], ids=["head", "body"])
def test_byte_by_byte(server: Running, monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    """Whoever always sends a little is not waited for any longer than who sends nothing."""
    monkeypatch.setattr("server.connection.HEAD_SECONDS", 0.4)
    monkeypatch.setattr("server.body.READ_SECONDS", 0.4)
    dropped = server.service.connections.dropped["head_timeout"]
    began = time.monotonic()
    with connected(server) as sock:
        sock.sendall(beginning)
        sock.settimeout(0.02)
        drip = b"1\r\nx\r\n" if beginning is CHUNKED else b"a"
        answer = None
        while answer is None and time.monotonic() < began + 5:
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock.sendall(drip)
                answer = sock.recv(100)
    assert time.monotonic() - began < 3
    if beginning is CHUNKED:
        assert status(answer or b"") == 408
    else:
        assert not answer
        assert server.service.connections.dropped["head_timeout"] == dropped + 1


def test_a_head_of_20_megabytes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.connection.LINGER_BYTES", 2**20)
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        taken = pour(sock, b"a" * 2**18, 80)
    assert taken < 16 * 2**20  # what the system's buffers hold, however much comes
    assert server.client.get("/health").status_code == 200


def test_300_headers(server: Running) -> None:
    for count, expected in ((MAX_HEADERS - 1, 200), (300, 400)):
        lines = "".join(f"X-{number}: 1\r\n" for number in range(count))
        with connected(server) as sock:
            sock.sendall(f"GET /health HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
            answer = sock.recv(2000) if expected == 200 else rest(sock)
        assert status(answer) == expected
    assert f"more than {MAX_HEADERS}".encode() in answer


def test_a_body_of_100_megabytes_is_refused_by_its_length(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(POST + b"Content-Length: %d\r\n\r\n{" % (100 * 2**20))
        assert status(sock.recv(100)) == 413


def test_a_body_without_an_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at the limit, and hung up on if it goes on."""
    monkeypatch.setattr("server.body.MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr("server.connection.HEAD_SECONDS", 0.3)
    with connected(server) as sock:
        sock.sendall(CHUNKED)
        piece = b"10000\r\n" + b"a" * 2**16 + b"\r\n"
        pour(sock, piece, 20)
        assert status(sock.recv(100)) == 413
        began = time.monotonic()
        pour(sock, piece, 10**6)
        assert time.monotonic() - began < 5
    server.wait(lambda: server.service.admission.body_bytes == 0)


def test_a_body_in_countless_pieces(server: Running) -> None:
    """What costs the server more than the client is not read to its end."""
    with connected(server) as sock:
        sock.sendall(CHUNKED)
        taken = pour(sock, b"1\r\na\r\n" * 1000, 2 * MAX_SMALL // 1000)
        answer = rest(sock)
    assert taken < 2 * MAX_SMALL * 6 or status(answer) == 400
    assert server.client.get("/health").status_code == 200
    whole = json.dumps({"prompt": "x" * 3000, "max_tokens": 1})
    assert server.client.post(COMPLETIONS, content=(c.encode() for c in whole)).status_code == 200


# ---- who does not read ----


def test_a_stream_that_is_not_read_is_given_up_and_others_do_not_notice(smol: Tokenizer) -> None:
    """The others get an event for every step, as they do without it."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running(smol, send_timeout=0.6) as server:
        server.engine.interval = 0.004
        connections = server.service.connections
        with connected(server, receive=4096) as sock:
            sock.sendall(asking(body | {"logprobs": 5}))  # some 800 bytes a token
            server.wait(lambda: bool(server.engine.sequences))
            with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=server.url, timeout=30) as client:
                fast = body | {"max_tokens": 300}
                others = list(pool.map(lambda _: events(client.post(COMPLETIONS, json=fast).text), range(4)))
            for chunks in others:
                assert chunks[-1] == "[DONE]"
                assert len(chunks) > 250
            server.wait(lambda: connections.dropped["send_timeout"] == 1)
            server.engine.wait_for(lambda engine: not engine.sequences)
            assert not rest(sock).endswith(b"0\r\n\r\n")
        server.wait(lambda: server.metric("octavo_requests_in_flight") == 0)
        server.wait(lambda: server.metric("octavo_client_disconnects_total") == 1)
        assert server.metric("octavo_connections_dropped_total", reason="send_timeout") == 1


def test_what_waits_for_a_slow_reader_is_bounded(smol: Tokenizer) -> None:
    """In the system's buffers, in the transport and in its RequestStream together: the text, not an event a token."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 5}
    with running(smol) as server, connected(server, receive=4096) as sock:
        sock.sendall(asking(body))
        server.wait(lambda: bool(server.engine.sequences))
        server.engine.wait_for(lambda engine: not engine.sequences, 20)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += sock.recv(1 << 16)
    assert answer.count(b"data: ") < 400
    assert b"[DONE]" in answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_is_not_read_is_given_up(smol: Tokenizer, version: str) -> None:
    """Also one that is no stream: it was written at once, and would lie there for ever."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "logprobs": 5}
    with running(smol, send_timeout=0.3) as server:
        connections = server.service.connections
        with connected(server, receive=4096) as sock:
            sock.sendall(asking(body).replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
            server.wait(lambda: connections.dropped["send_timeout"] == 1, 20)
            server.wait(lambda: connections.count == 0)
        assert server.complete().status_code == 200


def test_a_slow_but_steady_reader_gets_a_large_answer(smol: Tokenizer) -> None:
    """It takes longer than --send-timeout, and never stands still."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "logprobs": 5}
    with running(smol, send_timeout=0.4) as server:
        whole = server.post(COMPLETIONS, body).text
        with connected(server, receive=4096) as sock:
            sock.sendall(asking(body))
            answer, began = b"", time.monotonic()
            while len(answer) < len(whole):
                answer += sock.recv(1 << 14)
                time.sleep(0.02)  # that slowly
        assert time.monotonic() - began > 0.8
        assert server.service.connections.dropped["send_timeout"] == 0


# ---- who holds connections ----


def answered(server: Running) -> bytes:
    """What a new connection gets for a probe."""
    with connected(server) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return rest(sock)


def test_whoever_asks_for_nothing_makes_room(smol: Tokenizer) -> None:
    """Idle connections, half a head, half a body: the oldest goes first. Streams stay."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running(smol, max_connections=6) as server, contextlib.ExitStack() as stack:
        server.client.close()
        connections = server.service.connections
        server.wait(lambda: connections.count == 0)
        stream = stack.enter_context(connected(server))
        stream.sendall(asking(body))
        server.wait(lambda: bool(server.engine.sequences))
        server.engine.paused.set()
        held = server.service.admission.body_bytes
        socks = [stack.enter_context(connected(server)) for _ in range(5)]
        for sock, beginning in zip(socks, (b"", b"GET /he", CHUNKED, CHUNKED + b"1\r\n{\r\n", b""), strict=True):
            sock.sendall(beginning)
        server.wait(lambda: connections.count == 6 and server.service.admission.body_bytes == held + 1)
        for number, sock in enumerate(socks, 1):
            newcomer = stack.enter_context(connected(server))
            newcomer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status(newcomer.recv(4096)) == 200
            assert rest(sock) == b""
            assert connections.dropped["max_connections"] == number
        server.engine.paused.clear()
        whole = b""
        while not whole.endswith(b"0\r\n\r\n"):
            whole += stream.recv(1 << 16)
        assert b"[DONE]" in whole


def test_where_all_connections_are_busy_a_newcomer_is_told(smol: Tokenizer) -> None:
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running(smol, max_connections=2) as server, contextlib.ExitStack() as stack:
        server.client.close()
        server.engine.paused.set()
        connections = server.service.connections
        for _ in range(2):
            stack.enter_context(connected(server)).sendall(asking(body))
        server.wait(lambda: server.service.admission.requests == 2)
        with connected(server) as sock:
            sock.sendall(asking(body))
            refused = rest(sock)
        assert status(refused) == 503
        assert b"retry-after: " in refused.lower()
        assert b"2 connections" in refused
        stack.close()
        server.wait(lambda: connections.count == 0)
        server.engine.paused.clear()
        assert status(answered(server)) == 200


def test_connections_are_counted(server: Running) -> None:
    connections = server.service.connections
    before = connections.count
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(server))
        server.wait(lambda: connections.count == before + 20)
        assert server.metric("octavo_connections") >= before + 20
    server.wait(lambda: connections.count <= before + 1)
    assert len(connections._asking) == connections.count
