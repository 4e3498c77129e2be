"""A rank of a split model dies under a running stream: the stream goes on, and ends as it would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.e2e.daemon import Daemon, serve
from tests.loadtest import tiny

TOKENS = 200


def ranks(daemon: Daemon) -> list[psutil.Process]:
    """Rank 0 and 1."""
    found = daemon.processes()[1:]
    return sorted(
        (p for p in found if {"scheduler.worker", "scheduler.follower"} & set(p.cmdline())),
        key=lambda p: "scheduler.follower" in p.cmdline(),
    )


def stream(daemon: Daemon, disturb: Callable[[int], None]) -> str:
    """The text of an answer; `disturb` is told of every event that came."""
    body = {"prompt": "ab cd", "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    text, events = "", 0
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            text += json.loads(data)["choices"][0]["text"]
            events += 1
            disturb(events)
    return text


def test_a_rank_is_killed_under_a_stream(tmp_path: Path) -> None:
    """Over keys of 4 bits, whose fit and gate the ranks have to agree on; and a vocabulary that they cannot halve."""
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory", "4MiB")
    formats = ("--kv-cache-dtype", "tq4", "--force-kv-cache-dtype")
    seen: list[psutil.Process] = []
    with serve(str(tiny.write(tmp_path / "tiny.gguf")), *flags, *formats) as daemon:
        undisturbed = stream(daemon, lambda events: None)
        assert len(undisturbed) >= TOKENS

        def kill(events: int) -> None:
            if events == 10:
                seen.extend(ranks(daemon))
                seen[1].kill()

        assert stream(daemon, kill) == undisturbed
        assert daemon.metric("octavo_engine_restarts_total", ("reason", "killed")) == 1
        daemon.wait(daemon.at_rest, 5, "rest")
        seen.extend(ranks(daemon))
        assert len(set(seen)) == 4
        assert not any(process.is_running() for process in seen[:2])
    gone, alive = psutil.wait_procs(seen, 5)
    assert len(gone) == 4, alive
