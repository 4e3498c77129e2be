"""One server of a comparison as a process: started, waited for, watched, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.extras import extra
from loadtest.peers import Peer

STOP_SECONDS = 15
"""Between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.1
SAMPLE_SECONDS = 0.5
"""Between two looks at memory: each costs about a millisecond of one core."""


class Died(Exception):
    """It does not start, or is gone; one line."""


class Running:
    """A server that answers. `peak_rss` may be set back to 0; bytes, of the whole process tree."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
        self.process = process
        self.base_url = base_url
        self.log = log
        self.start_seconds = 0.0
        """From the start of the process until it served requests."""
        self.peak_rss = 0

    def check(self) -> None:
        """Raises Died where the process has ended."""
        if (code := self.process.poll()) is not None:
            raise Died(f"exit status {code}: {last_line(self.log)}")

    async def wait_ready(self, path: str, limit: float) -> None:
        began = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                self.check()
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with session.get(self.base_url + path) as response:
                        if response.status == 200:
                            self.start_seconds = time.perf_counter() - began
                            return
                if time.perf_counter() - began > limit:
                    raise Died(f"not ready within {limit:g} s: {last_line(self.log)}")
                await asyncio.sleep(POLL_SECONDS)

    async def watch(self) -> None:
        """Keeps `peak_rss`. A page that two processes share counts twice."""
        psutil = extra("psutil")
        while True:
            total = 0
            for process in tree(self.process.pid):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_rss = max(self.peak_rss, total)
            await asyncio.sleep(SAMPLE_SECONDS)


@asynccontextmanager
async def running(peer: Peer, log: Path, limit: float) -> AsyncIterator[Running]:
    """The server while it is needed. Whatever ends the block, SIGTERM too, none of its processes is left. Raises Died;
    CancelledError behind SIGTERM, once."""
    port = free_port()
    with log.open("ab") as out:
        try:
            process = subprocess.Popen(
                peer.started_on(port),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | peer.environment,
                # A session of its own: Ctrl-C is ours, and the whole group can be ended.
                start_new_session=True,
            )
        except OSError as error:
            raise Died(f"cannot run {peer.command[0]}: {error.strerror}") from None
    server = Running(process, f"http://127.0.0.1:{port}", log)
    watching = asyncio.create_task(server.watch())
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await server.wait_ready(peer.ready, limit)
        yield server
    finally:
        watching.cancel()
        stop(process)
        loop.remove_signal_handler(signal.SIGTERM)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and all below it: asked first, killed if need be. Blocks; nothing else has to go on."""
    # Looked up while they have their parent: one that leaves the group would else be lost.
    family = tree(process.pid)
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            with contextlib.suppress(extra("psutil").Error):
                member.kill()
        process.wait()
        extra("psutil").wait_procs(family, STOP_SECONDS)


def tree(pid: int) -> list[Any]:
    """The process and all below it, as psutil knows them."""
    psutil = extra("psutil")
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def last_line(log: Path) -> str:
    """What a log says last, which of a Python program that failed is its error."""
    lines = [line.strip() for line in log.read_bytes().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "its log is empty"
