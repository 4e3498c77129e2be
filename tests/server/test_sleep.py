"""Sleep: the engine's process ends and is begun again, by word or by a request; nobody is lost, and who may say so."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from model.tokenizer import Tokenizer
from scheduler.config import EngineConfig
from server.admission import Admission
from server.drain import until
from server.engine_client import EngineClient
from server.errors import Unavailable
from server.sleep import Sleep
from server.supervisor import Supervisor
from tests.server.running import COMPLETIONS, running
from tests.server.test_daemon import Process, daemon, in_flight, status, stream
from tests.server.test_daemon import until as eventually
from tests.server.test_engine_client import opener
from tests.server.test_supervisor import House, nothing, paused

ADMIN = {"authorization": "Bearer admin-secret"}
USER = {"authorization": "Bearer user-secret"}


@dataclass
class Bed:
    """A server's parts as far as sleep is concerned, over engines that are threads."""

    house: House
    admission: Admission
    sleep: Sleep

    @property
    def processes(self) -> int:
        return len(self.house.processes)


@asynccontextmanager
async def bed(*script: Any, seconds: float = 10.0) -> AsyncIterator[Bed]:
    house = House(EngineClient(clock=lambda: 0.0), list(script))
    supervisor = Supervisor(house.client, EngineConfig(), house.spawn(), house.spawn, 0, house.restarts)
    supervisor.start()
    admission = Admission(8, 8, 1000, lambda: house.client.queued_tokens)
    await house.client.ready
    try:
        yield Bed(house, admission, Sleep(house.client, admission, supervisor, seconds))
    finally:
        await supervisor.stop()


async def test_what_runs_ends_first(smol: Tokenizer) -> None:
    async with bed(nothing) as it:
        it.admission.reserve(1)
        running = it.house.client.open(opener(it.house.client, smol, max_tokens=30))
        falling = asyncio.create_task(it.sleep.fall())
        assert len((await running.collect())[0].token_ids) == 30
        assert it.sleep.on
        assert not falling.done()
        it.admission.release(1)
        await falling
        await it.sleep.fall()  # it sleeps already
        assert not it.house.client.serving
        await it.sleep.awake()
        assert it.house.client.serving
        assert (it.processes, it.house.restarts.total()) == (2, 0)


async def test_what_takes_too_long_is_ended(smol: Tokenizer) -> None:
    async with bed(paused, seconds=0.0) as it:
        it.admission.reserve(1)
        running = it.house.client.open(opener(it.house.client, smol))
        falling = asyncio.create_task(it.sleep.fall())
        with pytest.raises(Unavailable, match="put to sleep"):
            await running.collect()
        it.admission.release(1)
        await falling
        assert not it.house.client.serving


async def test_woken_before_it_slept(smol: Tokenizer) -> None:
    """The engine stays, and whoever wanted it to sleep is told. Next time it does."""
    async with bed(nothing) as it:
        it.admission.reserve(1)
        falling = asyncio.create_task(it.sleep.fall())
        assert await until(lambda: it.sleep.on, 5)
        it.sleep.wake()
        with pytest.raises(Unavailable):
            await falling
        assert (it.processes, it.house.client.serving) == (1, True)
        it.admission.release(1)
        await it.sleep.fall()
        assert not it.house.client.serving


async def test_woken_while_the_engine_ends() -> None:
    """It ends all the same, and another is begun at once; meanwhile nobody can put it to sleep."""
    async with bed(nothing) as it:
        ending = it.house.processes[0]
        ending.may_end.clear()
        falling = asyncio.create_task(it.sleep.fall())
        assert await until(lambda: not it.house.client.serving, 5)
        it.sleep.wake()
        with pytest.raises(Unavailable):
            await it.sleep.fall()
        ending.may_end.set()
        with pytest.raises(Unavailable):
            await falling
        await it.sleep.awake()
        assert (it.processes, it.house.client.serving, it.house.restarts.total()) == (2, True, 0)


async def test_where_no_engine_comes_nobody_waits_for_one(smol: Tokenizer) -> None:
    async with bed(nothing, OSError(12, "Cannot allocate memory")) as it:
        await it.sleep.fall()
        await it.sleep.awake()
        assert it.house.client.gone.is_set()


# ---- over HTTP, with a real process ----


def post(process: Process, path: str, **headers: str) -> httpx.Response:
    return httpx.post(process.url + path, headers=headers, timeout=30)


def ask(process: Process, **headers: str) -> httpx.Response:
    return httpx.post(process.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3}, headers=headers, timeout=30)


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = [{"name": "admin", "key": "admin-secret", "admin": True}, {"name": "user", "key": "user-secret"}]
    file.write_text(json.dumps({"keys": keys}))
    with daemon("--enable-sleep-mode", "--api-keys-file", str(file)) as process:
        yield process


def children(process: Process) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.process.pid).children() if "fake_engine" in str(child.cmdline())]


def test_asleep_there_is_no_process(sleeper: Process) -> None:
    """A running stream ends first; then requests get 503, the probes say what is, and all is well once it is woken."""
    before = sleeper.engine()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(
            lambda: httpx.post(
                sleeper.url + COMPLETIONS,
                json={"prompt": "x", "max_tokens": 20, "ignore_eos": True},
                headers=USER,
                timeout=30,
            )
        )
        eventually(lambda: in_flight(sleeper) == 1, 10)
        asleep = pool.submit(post, sleeper, "/sleep?level=1", **ADMIN)
        assert running.result(10).json()["usage"]["completion_tokens"] == 20
        assert asleep.result(10).json() == {"is_sleeping": True}
    assert not before.is_running()
    assert children(sleeper) == []
    refused = ask(sleeper, **USER)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "sleeps" in refused.json()["error"]["message"]
    for path, expected in (("/health", 200), ("/ready", 503)):
        reply = httpx.get(sleeper.url + path)
        assert (reply.status_code, reply.json()) == (expected, {"status": "asleep"})
    metrics = httpx.get(sleeper.url + "/metrics").text
    assert "octavo_engine_asleep 1.0" in metrics
    assert "octavo_engine_up 0.0" in metrics
    assert post(sleeper, "/sleep?level=2", **ADMIN).json() == {"is_sleeping": True}
    assert httpx.get(sleeper.url + "/is_sleeping", headers=USER).json() == {"is_sleeping": True}
    assert post(sleeper, "/wake_up", **ADMIN).json() == {"is_sleeping": False}
    assert ask(sleeper, **USER).status_code == 200
    assert status(sleeper, "/ready") == 200
    assert post(sleeper, "/wake_up", **ADMIN).json() == {"is_sleeping": False}
    assert 'octavo_engine_restarts_total{reason="killed"} 0.0' in httpx.get(sleeper.url + "/metrics").text


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_who_may_put_it_to_sleep(sleeper: Process, path: str) -> None:
    for headers, expected in (({}, 401), (USER, 403)):
        refused = post(sleeper, path, **headers)
        assert refused.status_code == expected
        assert "retry-after" not in refused.headers
    page = ADMIN | {"origin": "http://elsewhere.example", "content-type": "text/plain"}
    assert post(sleeper, path, **page).status_code == 415
    assert httpx.get(sleeper.url + "/is_sleeping", headers=USER).json() == {"is_sleeping": False}
    assert post(sleeper, "/sleep?level=3", **ADMIN).json()["error"]["param"] == "level"


def test_a_server_without_sleep_mode(smol: Tokenizer) -> None:
    with running(smol) as server:
        for path in ("/sleep", "/wake_up"):
            refused = server.client.post(path)
            assert refused.status_code == 404
            assert "--enable-sleep-mode" in refused.json()["error"]["message"]
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_request_wakes_it_and_a_signal_ends_it_asleep() -> None:
    with daemon("--enable-sleep-mode", "--wake-on-request") as process, ThreadPoolExecutor(4) as pool:
        assert post(process, "/sleep").status_code == 200
        assert status(process, "/ready") == 200  # so that somebody sends the request that wakes it
        for chunks in pool.map(stream, [process] * 4, [5] * 4):
            assert chunks[-1] == "[DONE]"
        assert len(children(process)) == 1
        assert post(process, "/sleep").status_code == 200
        process.process.terminate()
        try:
            assert process.wait(5) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("it does not end")
        assert "Traceback" not in process.log()
