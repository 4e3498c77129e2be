"""Starts the engine process, watches it, ends it. Restarting it, with the live streams resubmitted, belongs here."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import scheduler
from scheduler.config import EngineConfig
from server.engine_client import EngineClient

WORKER = (sys.executable, "-P", "-m", "scheduler.worker")
PACKAGES = Path(scheduler.__file__ or "").resolve().parent.parent
SPIN_COUNT = "3000"
"""How long a thread of the engine spins at a barrier before it sleeps. OpenMP's own choice, some milliseconds, makes
steps four times slower beside a busy process on the same cores; this costs a tenth while they are quiet, and halves
that (docs/performance.md)."""
STOP_SECONDS = 3.0
"""How long the engine gets to end by itself once its socket is closed."""


class Supervisor:
    """Owner of the engine process."""

    def __init__(self, client: EngineClient, config: EngineConfig, worker: Sequence[str] = WORKER) -> None:
        self._client = client
        self._config = config
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._conversation: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, with one end of a socket pair, and begin to listen to the other.

        The child reads end of file when this process dies, however it dies, and ends itself. It has a process group of
        its own, so that Ctrl-C in a terminal reaches only this process, which drains first.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*self._worker, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env=self._environment(),
            )
        self._conversation = asyncio.create_task(self._client.run(ours, self._config), name="engine")

    def _environment(self) -> dict[str, str]:
        """The one place for what only the engine should see: spinning, and huge pages for the pool and the weights."""
        paths = [str(PACKAGES), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return {"GOMP_SPINCOUNT": SPIN_COUNT, "THP_MEM_ALLOC_ENABLE": "1", **os.environ, **own}

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def exit_status(self) -> int | None:
        """Of the engine process; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Hang up, wait, and kill what does not end."""
        self._client.close()
        if self._conversation is not None:
            await self._conversation
        if self._process is None:
            return
        self._process.terminate()  # it may be loading, and not read
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
