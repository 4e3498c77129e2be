"""Engines die while streams run: no client notices more than a pause, and every text is what it would have been."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.daemon import Daemon, serve
from tests.faults.conftest import SERVER, engine, restarts
from tests.faults.requests import Answer, ask_all, mixture
from tests.faults.worker import DOWN, FAULTS, NAN

PROMPT = [504, 253, 338]
COUNT = 36
"""Requests at once, 32 of them streams."""


@pytest.fixture(scope="module")
def undisturbed(daemon: Daemon) -> list[Answer | BaseException]:
    answers = asyncio.run(ask_all(daemon, mixture(COUNT)))
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return answers


def during(daemon: Daemon, disturb: Callable[[], None]) -> list[Answer | BaseException]:
    """The answers of the same requests, while something is done to the engine in a thread beside."""

    async def both() -> list[Answer | BaseException]:
        disturbance = asyncio.create_task(asyncio.to_thread(disturb))
        answers = await ask_all(daemon, mixture(COUNT))
        await disturbance
        return answers

    return asyncio.run(both())


def generated(daemon: Daemon) -> float:
    return daemon.metric("octavo_generation_tokens_total")


def test_five_kills(daemon: Daemon, undisturbed: list[Answer | BaseException]) -> None:
    rng = random.Random(1)
    before = restarts(daemon)

    def kill() -> None:
        for _ in range(5):
            first = generated(daemon)
            amount = rng.randrange(1, 200)
            daemon.wait(lambda first=first, amount=amount: generated(daemon) >= first + amount, 60, "tokens")  # type: ignore[misc]
            victim = engine(daemon)
            victim.send_signal(signal.SIGKILL)
            daemon.wait(lambda victim=victim: not victim.is_running(), 10, "death")  # type: ignore[misc]

    assert during(daemon, kill) == undisturbed
    assert restarts(daemon) == before + 5
    daemon.wait(daemon.at_rest, 5, "rest")


def test_kills_before_anything_came(daemon: Daemon, undisturbed: list[Answer | BaseException]) -> None:
    """The next engine is killed as soon as it serves: nobody is to blame for that."""
    before = restarts(daemon)

    def kill() -> None:
        daemon.wait(lambda: daemon.metric("octavo_requests_running") > 0, 60, "requests")
        for number in range(3):
            victim = engine(daemon)
            victim.send_signal(signal.SIGKILL)
            daemon.wait(lambda victim=victim: not victim.is_running(), 10, "death")  # type: ignore[misc]
            after = before + number + 1
            daemon.wait(lambda after=after: restarts(daemon) == after and daemon.processes()[1:] != [], 30, "another")  # type: ignore[misc]
            daemon.wait(lambda: daemon.client.get(f"{daemon.url}/ready").status_code == 200, 60, "ready")

    assert during(daemon, kill) == undisturbed


def test_an_engine_that_stands_still(daemon: Daemon, undisturbed: list[Answer | BaseException]) -> None:
    hung = daemon.metric("octavo_engine_restarts_total", ("reason", "hung"))

    def stop() -> None:
        first = generated(daemon)
        daemon.wait(lambda: generated(daemon) >= first + 100, 60, "tokens")
        engine(daemon).send_signal(signal.SIGSTOP)

    assert during(daemon, stop) == undisturbed
    assert daemon.metric("octavo_engine_restarts_total", ("reason", "hung")) == hung + 1


def failures(daemon: Daemon, name: str) -> float:
    """Sequences that the engine gave up for a fault that it survives."""
    reason = {"raise": "raised", "allocate": "memory", "nan": "logits"}.get(name)
    return 0 if reason is None else daemon.metric("octavo_failed_sequences_total", ("reason", reason))


def faulty(name: str) -> dict[str, Any]:
    token = NAN if name == "nan" else FAULTS[name][0]
    return {"prompt": [token, *PROMPT], "max_tokens": 8, "stream": False}


@pytest.mark.parametrize(
    ("name", "most"), [("raise", 0), ("allocate", 0), ("nan", 0), ("abort", 6), ("hang", 6), ("escape", 6)]
)
def test_who_is_to_blame_fails_alone(
    daemon: Daemon, undisturbed: list[Answer | BaseException], name: str, most: int
) -> None:
    before, failed = restarts(daemon), failures(daemon, name)
    requests = mixture(COUNT if most == 0 else 8)
    *answers, guilty = asyncio.run(ask_all(daemon, [*requests, faulty(name)]))
    assert isinstance(guilty, openai.InternalServerError)
    assert guilty.status_code == 500
    if most:
        assert guilty.response.headers["x-should-retry"] == "false"
    assert answers == undisturbed[: len(requests)]
    assert failures(daemon, name) == failed + (most == 0)
    assert (2 if most else 0) <= restarts(daemon) - before <= most
    assert daemon.client.get(f"{daemon.url}/health").status_code == 200


def stream(url: str, prompt: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        return "".join(reply.iter_text())


@pytest.mark.parametrize("most", [0, 1])
def test_when_no_engine_comes_streams_end_with_an_error_and_so_does_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    down = tmp_path / "down"
    monkeypatch.setenv(DOWN, str(down))
    with serve("--max-engine-restarts", str(most), program=SERVER, status=1) as daemon:

        async def run() -> str:
            text = asyncio.create_task(asyncio.to_thread(stream, daemon.url, "Once"))
            await asyncio.to_thread(daemon.wait, lambda: generated(daemon) > 3, 60, "tokens")
            down.touch()
            engine(daemon).kill()
            return await text

        text = asyncio.run(run())
        assert '"error"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert daemon.process.wait(60) == 1
    assert not psutil.pid_exists(daemon.process.pid)


def test_a_drain_waits_for_the_next_engine() -> None:
    with serve(program=SERVER) as daemon:

        async def run() -> list[Answer | BaseException]:
            answers = asyncio.create_task(ask_all(daemon, mixture(4)))
            await asyncio.to_thread(daemon.wait, lambda: generated(daemon) > 3, 60, "tokens")
            engine(daemon).kill()
            daemon.process.send_signal(signal.SIGTERM)
            return await answers

        answers = asyncio.run(run())
        assert all(isinstance(answer, Answer) for answer in answers), answers
        try:
            assert daemon.process.wait(30) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("it does not end")
