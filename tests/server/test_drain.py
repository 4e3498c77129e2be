"""SIGTERM while clients do what they should not: nobody holds the server up."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server import test_daemon
from tests.server.running import COMPLETIONS
from tests.server.test_daemon import Process, daemon, in_flight, port_is_free, status, stream, until

POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


def connected(process: Process, beginning: bytes, receive: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", int(process.url.rpartition(":")[2])))
    sock.sendall(beginning)
    return sock


def test_what_waits_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admitted is admitted, though the engine has not begun with it when the signal comes."""
    one = test_daemon.LAUNCHER.replace('"0.02")', '"0.005", "--max-running", "1")')
    assert one != test_daemon.LAUNCHER
    monkeypatch.setattr(test_daemon, "LAUNCHER", one)
    with daemon("--drain-timeout", "20") as process, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, process, 60) for _ in range(4)]
        metrics = httpx.Client(base_url=process.url)
        until(lambda: "octavo_requests_waiting 3.0" in metrics.get("/metrics").text, 10)
        process.process.send_signal(signal.SIGTERM)
        for done in streams:
            chunks = done.result(20)
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
            assert chunks[-1] == "[DONE]"
        metrics.close()
        assert process.wait() == 0


def test_who_asks_for_nothing_and_who_does_not_read_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones, half a head, half a body, a stream that is not read: each is closed, without a fault in the log."""
    monkeypatch.setattr(test_daemon, "LAUNCHER", test_daemon.LAUNCHER.replace('"0.02"', '"0.002"'))
    with daemon("--drain-timeout", "0.4") as process, contextlib.ExitStack() as stack:
        content = json.dumps(
            {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 5}
        ).encode()
        ask = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content
        beginnings = [b"", b"GET /health HTTP/1.1\r\nHost", POST + b"Content-Length: 100\r\n\r\n{"]
        beginnings.append(
            POST + b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
        )  # refused
        socks = [stack.enter_context(connected(process, it)) for it in beginnings]
        socks.append(stack.enter_context(connected(process, ask, receive=2048)))
        until(lambda: in_flight(process) == 1, 10)
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        until(lambda: status(process, "/ready") == 503, 1)
        assert process.wait() == 0
        assert time.monotonic() - began < 5
        for sock in socks[:3]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(100) == b""
        assert port_is_free(process)
        assert "Traceback" not in process.log()


def test_a_body_that_comes_during_the_drain_is_refused() -> None:
    """A connection that was open before gets 503 on it and is closed; only what was admitted is served."""
    with daemon("--drain-timeout", "20") as process, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, process, 120)
        with connected(process, b"") as sock:
            until(lambda: in_flight(process) == 1, 10)
            process.process.send_signal(signal.SIGTERM)
            until(lambda: status(process, "/ready") == 503, 1)
            sock.sendall(POST + b"Content-Length: 100\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in answer
        assert running.result(20)[-1] == "[DONE]"
        assert process.wait() == 0
