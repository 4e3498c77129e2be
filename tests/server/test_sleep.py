"""Sleep: the engine's process ends and is begun again, by word or by a request; nobody is lost, and who may say so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from model.tokenizer import Tokenizer
from scheduler.config import EngineConfig
from server.admission import Admission
from server.drain import until as eventually
from server.engine_client import EngineClient
from server.errors import Unavailable
from server.metrics import Metrics
from server.service import Loaded, Service
from server.settings import Settings
from server.sleep import Engines, Sleep
from server.supervisor import Supervisor
from tests.server.running import COMPLETIONS, Running, running
from tests.server.test_daemon import daemon, in_flight, until
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
        assert await eventually(lambda: it.sleep.on, 5)
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
        assert await eventually(lambda: not it.house.client.serving, 5)
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


async def test_a_request_wakes_it_where_it_may(smol: Tokenizer) -> None:
    """And waits for the engine; else it is refused, and told to come back."""
    async with bed(nothing) as it:
        await it.sleep.fall()
        for may in (False, True):
            settings = Settings(enable_sleep_mode=True, wake_on_request=may)
            service = Service(settings, it.house.client, it.admission, Metrics(), ("m",), cast(Loaded, object()))
            service.sleep = it.sleep
            if may:
                service.require()
                assert service.state == "restarting"
            else:
                with pytest.raises(Unavailable, match="sleeps") as caught:
                    service.require()
                assert int(caught.value.headers["Retry-After"]) > 0
        assert len((await it.house.client.open(opener(it.house.client, smol)).collect())[0].token_ids) == 4
        assert service.state == "ready"


# ---- over HTTP ----


def keys(folder: Path) -> Path:
    file = folder / "keys.json"
    entries = [{"name": "admin", "key": "admin-secret", "admin": True}, {"name": "user", "key": "user-secret"}]
    file.write_text(json.dumps({"keys": entries}))
    return file


def put_to_bed(server: Running) -> Sleep:
    """It has no process that could be ended: for what is decided before that."""
    sleep = Sleep(server.service.client, server.service.admission, cast(Engines, None), 0)
    server.service.sleep = sleep
    return sleep


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_who_may_put_it_to_sleep(smol: Tokenizer, tmp_path: Path, path: str) -> None:
    with running(smol, api_keys_file=keys(tmp_path)) as server:
        put_to_bed(server)
        for headers, expected in (({}, 401), (USER, 403)):
            refused = server.client.post(path, headers=headers)
            assert refused.status_code == expected
            assert "retry-after" not in refused.headers
        page = {"origin": "http://elsewhere.example", "content-type": "text/plain"}
        assert server.client.post(path, headers=ADMIN | page).status_code == 415
        assert server.client.post("/sleep?level=3", headers=ADMIN).json()["error"]["param"] == "level"
        assert server.client.get("/is_sleeping", headers=USER).json() == {"is_sleeping": False}


def test_a_server_without_sleep_mode(server: Running) -> None:
    for path in ("/sleep", "/wake_up"):
        refused = server.client.post(path)
        assert refused.status_code == 404
        assert "--enable-sleep-mode" in refused.json()["error"]["message"]
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("wakes", [False, True])
def test_a_balancer_sends_requests_only_where_they_wake_it(smol: Tokenizer, wakes: bool) -> None:
    with running(smol, wake_on_request=wakes) as server:
        put_to_bed(server).on = True
        for path, expected in (("/health", 200), ("/ready", 200 if wakes else 503)):
            reply = server.client.get(path)
            assert (reply.status_code, reply.json()) == (expected, {"status": "asleep"})


def test_asleep_there_is_no_process(tmp_path: Path) -> None:
    """A running request ends first; then others get 503, and all is well once it is woken. A signal ends it asleep."""
    with (
        daemon("--enable-sleep-mode", "--api-keys-file", str(keys(tmp_path))) as process,
        ThreadPoolExecutor(2) as pool,
    ):

        def post(path: str) -> httpx.Response:
            return httpx.post(process.url + path, headers=ADMIN, timeout=60)

        def ask(tokens: int) -> httpx.Response:
            body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True}
            return httpx.post(process.url + COMPLETIONS, json=body, headers=USER, timeout=60)

        before = process.engine()
        running = pool.submit(ask, 20)
        until(lambda: in_flight(process) == 1, 10)
        asleep = pool.submit(post, "/sleep?level=1")
        assert running.result(30).json()["usage"]["completion_tokens"] == 20
        assert asleep.result(30).json() == {"is_sleeping": True}
        assert not before.is_running()
        assert psutil.Process(process.process.pid).children() == []
        refused = ask(1)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        metrics = httpx.get(process.url + "/metrics").text
        assert "octavo_engine_asleep 1.0" in metrics
        assert "octavo_engine_up 0.0" in metrics
        assert post("/wake_up").json() == {"is_sleeping": False}
        assert ask(3).json()["usage"]["completion_tokens"] == 3
        assert post("/wake_up").json() == {"is_sleeping": False}
        assert 'octavo_engine_restarts_total{reason="killed"} 0.0' in httpx.get(process.url + "/metrics").text
        assert post("/sleep?level=2").json() == {"is_sleeping": True}
        process.process.terminate()
        assert process.wait() == 0
        assert "Traceback" not in process.log()
