"""500 clients that leave, 64 at a time, at any moment there is; afterwards nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from tests.e2e.daemon import Daemon, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ABORTS, TOGETHER, WARM_UP = 500, 64, 150
MIB = 1 << 20
GROWTH = 48 * MIB
"""Of both processes, from behind the first 150 to the end: allocators keep what the largest step took."""
FILES = 4
SECONDS = 3.0
"""For the step under way, a long one on a busy machine, and the next."""
TEXT = "the old mill by the river stood quiet in the spring rain while people walked past it"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Any kind there is, of any length; some share their beginning."""
    text = TEXT * rng.choice([0, 0, 2]) + " ".join(rng.choices(TEXT.split(), k=rng.choice([3, 20, 200])))
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 60, 400]), "stream": rng.random() < 0.6}
    body |= rng.choice([{}, {"n": 3}, {"ignore_eos": True}, {"logprobs": True}, {"temperature": 0}])
    if body.get("logprobs"):
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.2:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        return CHAT, body | {"messages": [{"role": "user", "content": text}], "response_format": form}
    return COMPLETIONS, body | {"prompt": [text, text] if rng.random() < 0.1 else text}


async def leave(port: int, rng: random.Random) -> bool:
    """Ask, and hang up after some bytes of the request, some time, or some bytes of the answer. Whether the answer
    was still open."""
    path, body = request(rng)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    sent = head.encode() + content
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = rng.random()
    closed = False
    try:
        writer.write(sent[: rng.randrange(len(sent))] if kind < 0.1 else sent)
        await writer.drain()
        async with asyncio.timeout(rng.expovariate(2.0)):  # seconds
            for _ in range(rng.choice([1, 3, 30]) if kind < 0.6 else 10**6):
                if not await reader.read(1 << 12):
                    closed = True
                    break
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return not closed


async def leave_all(port: int, seeds: range) -> int:
    gate = asyncio.Semaphore(TOGETHER)

    async def one(seed: int) -> bool:
        async with gate:
            return await leave(port, random.Random(seed))

    return sum(await asyncio.gather(*(one(seed) for seed in seeds)))


def footprint(daemon: Daemon) -> tuple[int, int]:
    """Bytes and open files of all processes."""
    processes = daemon.processes()
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


def text(daemon: Daemon) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    return str(httpx.post(daemon.url + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"])


def test_500_aborts_leave_nothing() -> None:
    # A pool that 64 of them fill more than once, so that many are preempted or still wait when they are aborted.
    with serve("--max-num-seqs", "64", "--max-model-len", "1024", "--kv-cache-memory", "96MiB") as daemon:
        right = text(daemon)
        asyncio.run(leave_all(daemon.port, range(WARM_UP)))
        daemon.wait(daemon.at_rest, SECONDS, "blocks freed")
        resident, files = footprint(daemon)
        left = asyncio.run(leave_all(daemon.port, range(WARM_UP, ABORTS)))
        assert left > (ABORTS - WARM_UP) / 2
        daemon.wait(daemon.at_rest, SECONDS, "blocks freed")
        assert daemon.metric("octavo_requests_in_flight") == 0
        assert daemon.metric("octavo_queued_prompt_tokens") == daemon.metric("octavo_kv_active_tokens") == 0
        assert daemon.metric("octavo_requests_total", ("finish_reason", "error")) == 0
        assert daemon.metric("octavo_requests_total", ("finish_reason", "abort")) > left / 2
        daemon.wait(lambda: footprint(daemon)[1] <= files + FILES, 5, "files closed")
        grown = footprint(daemon)[0] - resident
        assert grown < GROWTH, f"{grown / MIB:.0f} MiB more"
        assert text(daemon) == right
        assert "Traceback" not in daemon.log.read_text()
