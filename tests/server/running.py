"""A server in a thread, on a real port, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from model.tokenizer import Tokenizer
from server.daemon import make_http, make_loaded, make_service
from server.service import Service
from server.settings import Settings
from tests.server.fake_engine import FakeEngine

MODEL = "owner/fake"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Running:
    """One server and what is behind it."""

    port: int
    engine: FakeEngine
    service: Service
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """A JSON body; bytes go out as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 4, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields})

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The chunks of a stream, in order; the last entry is "[DONE]"."""
        reply = self.post(path, {**fields, "stream": True})
        assert reply.status_code == 200, reply.text
        return events(reply.text)

    def call(self, action: Callable[[], Any]) -> Any:
        """Run something on the server's event loop."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self.loop).result(20)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of one scrape that carry these labels."""
        total, found = 0.0, False
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total, found = total + float(value), True
        assert found, f"no {name} {labels}"
        return total

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "never came true"
            time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of a stream's events, decoded, "[DONE]" as it is. Comments are left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream does not end with an empty line"
    data = []
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block, block
        data.append(block.removeprefix("data: "))
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


@contextlib.contextmanager
def running(
    tokenizer: Tokenizer, engine: Callable[[FakeEngine], None] | None = None, **flags: Any
) -> Iterator[Running]:
    """Serve until the block is left. `engine` may turn the fake engine's knobs before it starts."""
    settings = Settings(**{"max_num_seqs": 8, **flags})
    ours, theirs = socket.socketpair()
    fake = FakeEngine(theirs)
    if engine is not None:
        engine(fake)
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    box: dict[str, Any] = {}
    started = threading.Event()

    async def serve() -> None:
        service = make_service(settings, (MODEL, "alias"))
        http = make_http(service)
        box.update(service=service, http=http, loop=asyncio.get_running_loop())
        ours.setblocking(False)

        async def live() -> None:
            await service.client.run(ours, settings.engine())
            service.client.give_up()

        conversation = asyncio.create_task(live())
        serving = asyncio.create_task(http.serve([listener]))
        started.set()
        with contextlib.suppress(Exception):
            ready = await asyncio.shield(service.client.ready)
            service.loaded = make_loaded(settings, tokenizer, ready)
        await serving
        service.client.close()
        await conversation
        if service.loaded is not None:
            service.loaded.close()

    voice = threading.Thread(target=fake.run)
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    voice.start()
    thread.start()
    assert started.wait(10)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        server = Running(port, fake, box["service"], box["loop"], client)
        try:
            if fake.load_seconds == 0:
                server.wait(lambda: server.service.loaded is not None)
            yield server
        finally:
            box["http"].should_exit = True
            thread.join(10)
            voice.join(10)
            theirs.close()
    assert not thread.is_alive()
    assert not voice.is_alive()


@pytest.fixture(scope="module")
def shared(smol: Tokenizer) -> Iterator[Running]:
    """One server for the tests of a file that leave it as they found it."""
    with running(smol) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The shared server, its fake engine with fresh knobs; afterwards nothing runs, waits or holds a slot."""
    shared.engine.received.clear()
    defaults = FakeEngine(shared.engine.sock)
    shared.engine.reply, shared.engine.interval = defaults.reply, defaults.interval
    shared.engine.max_running, shared.engine.fail_with = defaults.max_running, None
    shared.engine.paused.clear()
    yield shared
    shared.engine.paused.clear()
    shared.wait(lambda: shared.service.admission.requests == 0)
    assert shared.service.admission.sequences == 0
    assert shared.service.client.live == {}
    assert shared.service.client.queued_tokens == 0
    assert shared.service.metrics.live == set()
