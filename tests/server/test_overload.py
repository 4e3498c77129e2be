"""More than the server takes: what is refused is refused at once, and what was accepted is served."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from model.tokenizer import Tokenizer
from tests.server import test_daemon
from tests.server.running import COMPLETIONS, running
from tests.server.test_daemon import daemon, status

BODY = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True}


async def ask(port: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one POST on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    answer = await reader.read()
    writer.close()
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), answer


def test_500_at_once(smol: Tokenizer) -> None:
    """Four come in and finish; the others learn at once that they do not, and when to come back."""

    def two(engine: Any) -> None:
        engine.max_running = 2

    with running(smol, two, max_num_seqs=2, max_queued_requests=2) as server:
        server.engine.paused.set()

        async def burst() -> list[tuple[int, dict[str, str], bytes]]:
            tasks = [asyncio.create_task(ask(server.port, BODY)) for _ in range(500)]
            refused = 0
            for done in asyncio.as_completed(tasks):
                refused += (await done)[0] == 429
                if refused == 496:  # nobody waited for those that were accepted
                    server.engine.paused.clear()
            return [task.result() for task in tasks]

        answers = asyncio.run(asyncio.wait_for(burst(), 60))
        assert Counter(code for code, _, _ in answers) == {200: 4, 429: 496}
        spent = []
        for code, headers, body in answers:
            if code == 200:
                assert json.loads(body)["usage"]["completion_tokens"] == 5
            else:
                assert 1 <= int(headers["retry-after"]) <= 30
                assert json.loads(body)["error"]["code"] == "server_overloaded"
                spent.append(float(headers["openai-processing-ms"]))
        assert statistics.median(spent) < 50
        assert server.metric("octavo_rejected_total", reason="max_queued_requests") == 496
        server.wait(lambda: server.metric("octavo_requests_in_flight") == 0)


def test_every_sequence_counts(smol: Tokenizer) -> None:
    """A request of n sequences takes n places, or none."""

    def one(engine: Any) -> None:
        engine.max_running = 1

    with running(smol, one, max_num_seqs=1, max_queued_requests=3) as server:
        server.engine.paused.set()

        async def burst() -> list[int]:
            first = asyncio.create_task(ask(server.port, BODY | {"n": 3}))
            await asyncio.to_thread(server.engine.wait_for, lambda engine: len(engine.submits()) == 1)
            refused = await ask(server.port, BODY | {"n": 2})
            second = asyncio.create_task(ask(server.port, BODY))
            await asyncio.to_thread(server.engine.wait_for, lambda engine: len(engine.submits()) == 2)
            full = await ask(server.port, BODY)
            server.engine.paused.clear()
            return [refused[0], full[0], (await first)[0], (await second)[0]]

        assert asyncio.run(asyncio.wait_for(burst(), 30)) == [429, 429, 200, 200]


def test_more_connections_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps accepting, answers whoever asks for something, and does not spin."""
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    monkeypatch.setattr(test_daemon, "LAUNCHER", limited + test_daemon.LAUNCHER)
    with daemon() as process:
        port = int(process.url.rpartition(":")[2])

        async def hold(count: int) -> None:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
            for _ in range(20):
                assert (await ask(port, BODY))[0] == 200
            spent = psutil.Process(process.process.pid)
            before = sum(spent.cpu_times()[:2])
            await asyncio.sleep(0.5)  # the span that is measured
            assert sum(spent.cpu_times()[:2]) - before < 0.3
            for _, writer in held:
                writer.close()

        asyncio.run(asyncio.wait_for(hold(400), 60))
        assert status(process, "/health") == 200
        dropped = 'octavo_connections_dropped_total{reason="max_connections"} '
        (line,) = [it for it in httpx.get(process.url + "/metrics").text.splitlines() if it.startswith(dropped)]
        assert float(line.rpartition(" ")[2]) > 300
        process.process.terminate()
        assert process.wait() == 0
        log = process.log()
    assert "open files are limited" in log
    assert "Traceback" not in log
    assert "out of system resource" not in log
