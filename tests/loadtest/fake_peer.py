"""A server that takes llama-server's flags and answers at a fixed pace: a real process for `octavo bench compare`.

--journal FILE  writes down what happens, one JSON object a line
--gap S         seconds between two tokens
--refuse TEXT   ends at once with this as its last word
--die-after N   ends in the middle of request N
--status CODE   of every answer
--stall         never ends an answer, and starts a child in a session of its own that never ends either
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from aiohttp import web

from tests.loadtest.scripted import completion_events, event


class Fake:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.requests = 0

    def note(self, **what: Any) -> None:
        if self.args.journal:
            with open(self.args.journal, "a") as file:
                file.write(json.dumps({"label": self.args.label, **what}) + "\n")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "meta": {"n_vocab": 900}}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests += 1
        self.note(event="request", **body)
        if self.args.status != 200:
            return web.json_response({"error": {"message": "cannot"}}, status=self.args.status)
        if self.requests == self.args.die_after:
            sys.stderr.write("RuntimeError: out of luck\n")
            os._exit(7)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.args.stall:
            await response.write(event({"choices": [{"text": "a"}]}))
            await asyncio.sleep(600)
        count = body["max_tokens"]
        for piece in completion_events(["x"] * count, len(body["prompt"]), count):
            await response.write(piece)
            await asyncio.sleep(self.args.gap)
        return response


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("-m", "-t", "-c", "--parallel"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--label")
    parser.add_argument("--journal")
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--refuse")
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--status", type=int, default=200)
    parser.add_argument("--stall", action="store_true")
    args = parser.parse_args()
    if args.refuse:
        sys.exit(args.refuse)
    fake = Fake(args)
    child = None
    if args.stall:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    fake.note(event="start", model=args.m, pids=[os.getpid()] + ([child.pid] if child else []))
    app = web.Application()
    app.router.add_get("/health", fake.health)
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.complete)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, shutdown_timeout=1)
    fake.note(event="stop")


if __name__ == "__main__":
    main()
