"""The engine's process, as the operating system sees it: begun before all else, for it has the longest way to go.

begin the process ─ settings ─ bind ─ import FastAPI and the rest ─ listen ─ send the configuration
       └ import torch ───────────────────────────────────────────────────────────┴ load the model ─ ready
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from scheduler.child import python_path
from scheduler.messages import STACKS

WORKER = (sys.executable, "-P", "-m", "scheduler.worker")
SPIN_COUNT = "3000"
"""How long a thread of the engine spins at a barrier before it sleeps. OpenMP's own choice, some milliseconds, makes
steps four times slower beside a busy process on the same cores; this costs a tenth while they are quiet, and halves
that (docs/performance.md)."""
STOP_SECONDS = 3.0
"""How long the engine gets to end by itself once its socket is closed."""
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
DEATHS = ("killed", "crashed", "failed", "hung", "unready")
"""Reasons: by a signal from outside (or for want of memory); by a fault of its own; with an exit status; by the
watchdog; before it served."""


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine process ended."""

    reason: str
    """One of DEATHS."""
    detail: str
    outside: bool = False
    """Perhaps by no fault of its own, so that what it worked on need not be to blame."""

    @staticmethod
    def of(status: int) -> Death:
        """From its exit status; negative: the signal that ended it."""
        if status > 0:
            return Death("failed", f"exit status {status}")
        if status == 0:  # so it ends when it is told to
            return Death("killed", "it was told to end", outside=True)
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return Death("crashed", name) if -status in CRASHES else Death("killed", name, outside=True)


class EngineProcess:
    """Runs from the start on. Use as a context manager: at its end the process has ended."""

    def __init__(self, worker: Sequence[str] | None = None) -> None:
        """The child has one end of a socket pair, `sock` is the other.

        It reads end of file when this process dies, however it dies, and ends itself, and with it the other ranks of a
        split model, its children. It has a process group of its own, so that Ctrl-C in a terminal reaches only this
        process, which drains first. OSError where there is no room for a process.
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
    def stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def show_stacks(self) -> None:
        """Ask it, and the other ranks of a split model, for the stacks of all threads. It takes no lock, and no step's
        end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, STACKS)

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    async def ended(self) -> int:
        """Its socket is closed: its exit status. Lets it end, and kills what does not."""
        try:
            return await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End it, whatever it does."""
        self._process.terminate()  # it may be loading, and not read
        await self.ended()
        self.sock.close()


def _environment() -> dict[str, str]:
    """The one place for what only the engine should see: spinning, and huge pages for the pool and the weights."""
    return {"GOMP_SPINCOUNT": SPIN_COUNT, "THP_MEM_ALLOC_ENABLE": "1", **os.environ, "PYTHONPATH": python_path()}
