"""A real HTTP server in a thread that answers exactly as a test scripts it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """Status and pieces of the body; before each piece the server waits so many seconds."""

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    cut: bool = False
    """Close the connection in the middle of the body."""


def event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def completion_events(texts: Sequence[str], prompt_tokens: int, completion_tokens: int) -> list[bytes]:
    """What a server streams: a chunk per text, the finish reason, usage, [DONE]."""
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None} for text in texts]
    chunks[-1]["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    return [event(chunk) for chunk in chunks] + [event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


@dataclass
class Scripted:
    """`answer` maps a POST's path and body to a reply; `models` is what GET /v1/models says."""

    answer: Callable[[str, dict[str, Any]], Reply]
    models: object = field(default_factory=lambda: {"data": [{"id": "owner/model", "vocab_size": 500}]})
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of all POSTs to a completions endpoint, in order of arrival."""
    keys: list[str | None] = field(default_factory=list)
    """What was sent as Authorization with each of them."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of all GETs."""
    in_flight: int = 0
    most_in_flight: int = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if self.models is None:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        return web.json_response(self.models)

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path.endswith("completions"):
            self.bodies.append(body)
            self.keys.append(request.headers.get("Authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            reply = self.answer(request.path, body)
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for wait, piece in reply.pieces:
                await asyncio.sleep(wait)
                await response.write(piece)
            if reply.cut:
                assert request.transport is not None
                request.transport.abort()
            return response
        finally:
            self.in_flight -= 1


@contextmanager
def serving(
    answer: Callable[[str, dict[str, Any]], Reply], models: object | None = None, hide_models: bool = False
) -> Iterator[Scripted]:
    scripted = Scripted(answer)
    if models is not None or hide_models:
        scripted.models = models
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", scripted.get)
        app.router.add_post("/{path:.*}", scripted.post)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        scripted.url = f"http://127.0.0.1:{port}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield scripted
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def stream_of(texts: Sequence[str], tokens: int | None = None) -> Callable[[str, dict[str, Any]], Reply]:
    """Answers every request with these texts at once."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        count = len(body["prompt"]) if "prompt" in body else 5
        events = completion_events(texts, count, tokens if tokens is not None else len(texts))
        return Reply([(0, piece) for piece in events])

    return answer
