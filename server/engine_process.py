"""The engine's process, as the operating system sees it: begun before all else, for it has the longest way to go.

settings ─ bind ─ begin the process ─ import FastAPI and the rest ─ listen ─ send the configuration
                       └ import torch ───────────────────────────────────────────┴ load the model ─ ready
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import scheduler

WORKER = (sys.executable, "-P", "-m", "scheduler.worker")
PACKAGES = Path(scheduler.__file__ or "").resolve().parent.parent
SPIN_COUNT = "3000"
"""How long a thread of the engine spins at a barrier before it sleeps. OpenMP's own choice, some milliseconds, makes
steps four times slower beside a busy process on the same cores; this costs a tenth while they are quiet, and halves
that (docs/performance.md)."""
STOP_SECONDS = 3.0
"""How long the engine gets to end by itself once its socket is closed."""


class EngineProcess:
    """Runs from the start on. Use as a context manager: at its end the process has ended."""

    def __init__(self, worker: Sequence[str] | None = None) -> None:
        """The child has one end of a socket pair, `sock` is the other.

        It reads end of file when this process dies, however it dies, and ends itself. It has a process group of its
        own, so that Ctrl-C in a terminal reaches only this process, which drains first.
        """
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*(worker or WORKER), "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env=_environment(),
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    async def stop(self) -> None:
        """Its socket is closed: let it end, and kill what does not."""
        self._process.terminate()  # it may be loading, and not read
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def _environment() -> dict[str, str]:
    """The one place for what only the engine should see: spinning, and huge pages for the pool and the weights."""
    paths = [str(PACKAGES), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {"GOMP_SPINCOUNT": SPIN_COUNT, "THP_MEM_ALLOC_ENABLE": "1", **os.environ, **own}
