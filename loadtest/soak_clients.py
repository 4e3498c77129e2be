"""The clients of a soak, good and bad, and what they see."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import orjson

from loadtest.running import Died, Running, tree
from loadtest.soak_traffic import Ask, Traffic

START_SECONDS = 180.0
ANSWER_SECONDS = 300.0
BURST = 200
GRACE_SECONDS = 5.0
"""For so long after a burst, or after the engine is back, a refusal is still explained by it."""
UNREAD_SECONDS = 30.0
"""Far longer than the server waits for a client that does not read."""


@dataclass(slots=True)
class Seen:
    """Of a stretch of time, by all clients together."""

    began: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    """What the server did wrong."""
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    """Seconds to the first event of each whole stream."""
    bursts: int = 0
    kills: int = 0

    def add(self, other: Seen) -> None:
        for mine, new in ((self.kinds, other.kinds), (self.ends, other.ends), (self.broken, other.broken)):
            mine.update(new)
        self.tokens += other.tokens
        self.ttft += other.ttft
        self.bursts += other.bursts
        self.kills += other.kills


@dataclass(frozen=True, slots=True)
class Read:
    """What an answer says, or what is wrong with it."""

    text: str = ""
    tokens: int = 0
    fault: str | None = None


class Clients:
    """Against one server, until they are told to end."""

    def __init__(self, server: Running, traffic: Traffic, concurrency: int) -> None:
        self.seen = Seen()
        """Since somebody last replaced it."""
        self._server = server
        self._traffic = traffic
        self._concurrency = concurrency
        self._end = 0.0
        self._canary: str | None = None
        self._burst_until = self._down_until = 0.0

    async def run(self, seconds: float, burst_every: float, kill_every: float | None) -> None:
        """All of them for so long; at the end each finishes what it does. Raises Died."""
        self._end = time.monotonic() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._concurrency):
                        group.create_task(self._client(session))
                    group.create_task(self._slow_reader())
                    group.create_task(self._bursts(session, burst_every))
                    if kill_every is not None:
                        group.create_task(self._kills(kill_every))
            except ExceptionGroup as group_of_tasks:
                if (died := group_of_tasks.subgroup(Died)) is None:
                    raise
                raise Died(str(died.exceptions[0])) from None

    async def _client(self, session: aiohttp.ClientSession) -> None:
        traffic = self._traffic
        while time.monotonic() < self._end:
            self._server.check()
            if traffic.share(0.1):
                await self._ask(session, traffic.malformed())
            elif traffic.share(0.2):
                await self._leave(session, traffic.draw())
            else:
                await self._ask(session, traffic.draw())

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        began = time.monotonic()
        self.seen.kinds[ask.kind] += 1
        try:
            status, data, first = await self._send(session, ask)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._wrong(ask, f"no answer: {type(error).__name__}")
            return
        if status not in ask.expect:
            # A burst leads to 429, a killed engine to 503.
            until, name = (self._burst_until, "refused") if status == 429 else (self._down_until, "unavailable")
            if status in (429, 503) and began <= until:
                self.seen.ends[name] += 1
            else:
                self._wrong(ask, f"HTTP {status} {_code(data)}")
        elif status != 200:
            self.seen.ends["rejected, as is right"] += 1
        else:
            self._judge(ask, read_stream(data) if ask.stream else read_whole(data), first)

    def _judge(self, ask: Ask, read: Read, first: float | None) -> None:
        if read.fault is not None:
            self._wrong(ask, read.fault)
            return
        self.seen.ends["whole"] += 1
        self.seen.tokens += read.tokens
        if first is not None:
            self.seen.ttft.append(first)
        if ask.kind == "canary":
            self._canary = self._canary or read.text
            if read.text != self._canary:
                self._wrong(ask, "another text")

    def _wrong(self, ask: Ask, what: str) -> None:
        self.seen.ends["broken"] += 1
        self.seen.broken[f"{ask.kind}: {what}"] += 1

    async def _send(self, session: aiohttp.ClientSession, ask: Ask) -> tuple[int, bytes, float | None]:
        """Status, body, and of a stream the seconds to its first event."""
        data = ask.body if isinstance(ask.body, bytes) else orjson.dumps(ask.body)
        began, first, parts = time.monotonic(), None, []
        url, headers = self._server.base_url + ask.path, {"Content-Type": "application/json"}
        async with session.post(url, data=data, headers=headers) as response:
            async for part in response.content.iter_any():
                if first is None and part.startswith(b"data: "):
                    first = time.monotonic() - began
                parts.append(part)
        return response.status, b"".join(parts), first

    async def _leave(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Ask, and hang up sooner or later."""
        self.seen.kinds["leaving"] += 1
        try:
            async with asyncio.timeout(self._traffic.seconds(0.7)):
                await self._send(session, ask)
            self.seen.ends["whole"] += 1
        except TimeoutError:
            self.seen.ends["left"] += 1
        except (aiohttp.ClientError, OSError) as error:
            self._wrong(ask, f"no answer before it left: {type(error).__name__}")

    async def _slow_reader(self) -> None:
        """One after the other reads nothing."""
        host, port = self._server.base_url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        while (left := self._end - time.monotonic()) > 0:
            ask = self._traffic.slow()
            data = orjson.dumps(ask.body)
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, (host, int(port)))
                head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
                await loop.sock_sendall(sock, head.encode() + data)
                await asyncio.sleep(min(UNREAD_SECONDS, left))
            self.seen.kinds[ask.kind] += 1
            self.seen.ends["not read"] += 1

    async def _bursts(self, session: aiohttp.ClientSession, every: float) -> None:
        """Far more at once than the server takes."""
        while await self._pause(every):
            self.seen.bursts += 1
            self._burst_until = float("inf")
            await asyncio.gather(*(self._ask(session, self._traffic.short()) for _ in range(BURST)))
            self._burst_until = time.monotonic() + GRACE_SECONDS

    async def _kills(self, every: float) -> None:
        """kill -9 for the engine; the server has to bring it back. Raises Died."""
        while await self._pause(every):
            self._down_until = float("inf")
            for process in tree(self._server.process.pid)[1:]:
                if "scheduler.worker" in process.cmdline():
                    process.kill()
                    self.seen.kills += 1
            await asyncio.sleep(0.5)  # so that the server knows
            await self._server.wait_ready("/ready", START_SECONDS)
            self._down_until = time.monotonic() + GRACE_SECONDS

    async def _pause(self, seconds: float) -> bool:
        """Whether there is time left behind it."""
        left = self._end - time.monotonic()
        await asyncio.sleep(max(0.0, min(seconds, left)))
        return left > seconds


def read_whole(data: bytes) -> Read:
    try:
        answer = orjson.loads(data)
        return Read((answer.get("choices") or [{}])[0].get("text") or "", answer["usage"].get("completion_tokens", 0))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return Read(fault="no JSON of an answer")


def read_stream(data: bytes) -> Read:
    """Tokens are events here. Whole only with a finish reason and [DONE]."""
    *events, end = [event for event in data.split(b"\n\n") if event and not event.startswith(b":")] or [b""]
    if end != b"data: [DONE]":
        return Read(fault="a stream that breaks off")
    text, count, finished = "", 0, False
    for event in events:
        chunk = orjson.loads(event.removeprefix(b"data: "))
        if error := chunk.get("error"):
            return Read(fault=f"an error event: {error.get('code')}")
        for choice in chunk.get("choices") or []:
            count += 1
            text += choice.get("text") or ""
            finished = finished or choice.get("finish_reason") is not None
    return Read(text, count, None if finished else "a stream without a finish reason")


def _code(data: bytes) -> str:
    with contextlib.suppress(orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return str(orjson.loads(data)["error"]["code"])
    return "without an error's code"
