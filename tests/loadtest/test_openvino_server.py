"""The driver's HTTP and its stepping, with a pipeline that counts instead of computing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from loadtest.client import Client, Target
from loadtest.openvino_server import Request, Server
from loadtest.outcome import Outcome
from loadtest.workloads import Prompt


@dataclass
class Output:
    generated_ids: list[int]


@dataclass
class Handle:
    """As openvino_genai's: what a step made is read once."""

    request: Request
    made: int = 0
    unread: list[int] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def get_status(self) -> str:
        return "GenerationStatus." + ("RUNNING" if self.made < self.request.max_tokens else "FINISHED")

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Output]:
        ids, self.unread = self.unread, []
        return {0: Output(ids)}

    def cancel(self) -> None:
        self.cancelled.set()


class Pipeline:
    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.widest = 0

    def start(self, request: Request) -> Handle:
        self.handles.append(Handle(request))
        return self.handles[-1]

    def step(self) -> None:
        live = [handle for handle in self.handles if handle.made < handle.request.max_tokens]
        self.widest = max(self.widest, len(live))
        for handle in live:
            handle.unread.append(1000 + handle.made)
            handle.made += 1


@asynccontextmanager
async def serving(pipeline: Pipeline) -> AsyncIterator[str]:
    server = Server(pipeline, pipeline.start, "the-model")
    working = asyncio.create_task(server.work())
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    working.cancel()


async def test_answers() -> None:
    pipeline = Pipeline()
    async with serving(pipeline) as url, Client(Target(url, timeout=30)) as client:
        served = await client.served()
        assert served.model == "the-model"

        async def ask(length: int) -> Outcome:
            return await client.send(Prompt([5] * length, length, length * 100), {"ignore_eos": True}, 0.0)

        outcomes = await asyncio.gather(*(ask(n) for n in (1, 2, 3)))
    for number, outcome in enumerate(outcomes, 1):
        assert outcome.failure is None
        assert (outcome.input_tokens, outcome.output_tokens) == (number, number * 100)
    assert [len(handle.request.ids) for handle in pipeline.handles] == [1, 2, 3]
    assert all(handle.request.ignore_eos for handle in pipeline.handles)
    assert pipeline.widest > 1, "requests share steps"


async def test_a_pipeline_that_fails_ends_the_process() -> None:
    class Broken(Pipeline):
        def step(self) -> None:
            raise RuntimeError("out of memory")

    pipeline = Broken()
    server = Server(pipeline, pipeline.start, "the-model")
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with Client(Target(url, timeout=30)) as client:
            asking = asyncio.create_task(client.send(Prompt([5], 1, 1), {}, 0.0))
            with pytest.raises(RuntimeError, match="out of memory"):
                await asyncio.wait_for(server.work(), 30)
            asking.cancel()


async def test_a_client_that_hangs_up() -> None:
    pipeline = Pipeline()
    async with serving(pipeline) as url, aiohttp.ClientSession() as session:
        body = {"prompt": [1], "max_tokens": 10**9}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await asyncio.wait_for(pipeline.handles[0].cancelled.wait(), 30)


async def test_what_is_refused() -> None:
    async with serving(Pipeline()) as url, aiohttp.ClientSession() as session:
        for body, words in (({"prompt": "text", "max_tokens": 1}, "ValueError"), ({"prompt": [1]}, "KeyError")):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 400
                assert words in (await response.json())["error"]["message"]
        async with session.get(f"{url}/nowhere") as response:
            assert response.status == 404
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
