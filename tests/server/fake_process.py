"""An engine's process that is a thread: a FakeEngine in the place of what `server.engine_process` begins."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable

from tests.server.fake_engine import FakeEngine


class FakeProcess:
    """Knows what was done to it."""

    def __init__(self, prepare: Callable[[FakeEngine], None] = lambda engine: None) -> None:
        """`prepare` turns the engine's knobs before it begins."""
        self.sock, self._theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.engine = FakeEngine(self._theirs)
        prepare(self.engine)
        self.status = 0
        self.stopped = False
        self.stacks = 0
        """How often it was asked for them."""
        self.may_end = asyncio.Event()
        """Until then it takes its time to end."""
        self.may_end.set()
        self._thread = threading.Thread(target=self.engine.run)
        self._thread.start()

    def kill(self) -> None:
        self.die(-signal.SIGKILL)

    def die(self, status: int) -> None:
        """With that exit status."""
        self.status = status
        with contextlib.suppress(OSError):
            self.engine.die()

    def show_stacks(self) -> None:
        self.stacks += 1

    async def ended(self) -> int:
        """As soon as its socket is closed."""
        await self.may_end.wait()
        await asyncio.to_thread(self._thread.join, 10)
        assert not self._thread.is_alive()
        self._theirs.close()
        return self.status

    async def stop(self) -> None:
        self.die(-signal.SIGTERM)
        await self.ended()
        self.sock.close()
