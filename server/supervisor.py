"""Watches the engine's process, and puts another in its place when it dies. The clients notice nothing but a pause.

first process ── ends before it serves ──▶ nobody is left to serve: the server cannot start
      │ ready
      ▼
   SERVING ◀──────────────── ready: all live requests are sent to it, as `probation` allows ───────────┐
      │ its socket closes; or it is silent with work pending: its stacks are shown, and it is killed   │
      ▼                                                                                                │
   how did it end? who is guilty fails   ◀── dies, cannot start, takes too long ── LOADING ────────────┘
      │ failures + 1; from 0 where it had brought a token, or had served for a minute  ▲
      ├── more than --max-engine-restarts: everybody fails, the server ends            │
      └── wait 0, 1, 2, 4, … s ────────────────────── another process ─────────────────┘

A process that is dismissed is no failure: there is none until somebody calls for one (`sleep`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from scheduler.config import EngineConfig
from server.engine_client import EngineClient
from server.engine_process import Death, EngineProcess

log = logging.getLogger("octavo.engine")

STEADY_SECONDS = 60.0
"""An engine that served for so long, even idle, was no failure."""
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Before the second restart in a row, and at most; each is twice as long as the one before."""
LOAD_SECONDS = 60.0
SLOW_LOADS = 10
"""Another engine may take a minute to load, and ten times what the first one took."""
STACK_SECONDS = 1.0
"""For a hung engine to write its stacks."""


class Supervisor:
    """Owns the process that is now. Talks to it through the client."""

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig,
        process: EngineProcess,
        spawn: Callable[[], EngineProcess],
        most: int,
        restarts: Counter[str],
    ) -> None:
        """`process`: the first; `spawn` makes the next, at most `most` in a row without progress. `restarts`: counted
        here, by reason."""
        self._client = client
        self._config = config
        self._process = process
        self._spawn = spawn
        self._most = most
        self._restarts = restarts
        self._failures = 0
        self._hung: Death | None = None
        self._dismissed = False
        self._wanted, self._idle = asyncio.Event(), asyncio.Event()
        """There is to be a process; there is none, and the last one was dismissed."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send the configuration, and begin to listen."""
        self._task = asyncio.create_task(self._run(), name="engine")

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    async def dismiss(self) -> None:
        """End the process, and begin no other until `call`. Returns when there is none."""
        self._dismissed = True
        self._wanted.clear()
        self._client.close()
        await self._idle.wait()

    def call(self) -> None:
        """After `dismiss`: there is to be a process again."""
        self._wanted.set()

    async def stop(self) -> None:
        """Hang up, wait, and kill what does not end. No other process follows."""
        self._client.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._process.stop()

    async def _run(self) -> None:
        try:
            death = await self._life()
            while await self._goes_on(death):
                try:
                    self._process = self._spawn()
                except OSError as error:
                    death = Death("unready", f"no process can be made: {error.strerror}")
                else:
                    death = await self._life()
        except Exception:
            log.exception("the engine is no longer supervised")
        finally:
            self._client.give_up()
            self._idle.set()

    async def _life(self) -> Death:
        """Of the process that is now, from its configuration to its end."""
        client, process = self._client, self._process
        self._hung = None
        watch = asyncio.create_task(self._watch(process), name="watchdog")
        try:
            served = await client.run(process.sock, self._config)
        finally:
            watch.cancel()
            (broken,) = await asyncio.gather(watch, return_exceptions=True)
        if isinstance(broken, Exception):
            raise broken
        ended = Death.of(await process.ended())
        if served is None:
            return self._hung or Death("unready", ended.detail)
        if client.advanced or served > STEADY_SECONDS:
            self._failures = 0
        death = self._hung or ended
        client.bury(death.outside)
        return death

    async def _goes_on(self, death: Death) -> bool:
        """Whether there is to be another process; waits until it is time for it."""
        client = self._client
        if not client.coming:
            return False
        if self._dismissed:
            self._dismissed = False
            self._idle.set()
            await self._wanted.wait()
            self._idle.clear()
            return True
        self._failures += 1
        if self._failures > self._most:
            log.error("the engine process ended (%s, %s); no other follows", death.reason, death.detail)
            return False
        self._restarts[death.reason] += 1
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** (self._failures - 2)) if self._failures > 1 else 0.0
        log.error(
            "the engine process ended (%s, %s); another starts in %g s, number %d of %d without progress; "
            "%d requests wait for it",
            *(death.reason, death.detail, pause, self._failures, self._most, len(client.live)),
        )
        await asyncio.sleep(pause)
        return True

    async def _watch(self, process: EngineProcess) -> None:
        """Kill a process that is hung."""
        loop = asyncio.get_running_loop()
        client = self._client
        tick = min(1.0, client.patience / 10)
        began = loop.time()
        while True:
            before = loop.time()
            await asyncio.sleep(tick)
            late = loop.time() - before - tick
            if late > tick:
                client.excuse(late)
                began += late
            if client.stalled:
                why = "silent with work pending"
                break
            if client.coming and not client.serving and loop.time() - began > self._longest_load():
                why = "loading for too long"
                break
        self._hung = Death("hung", why, outside=process.stopped)
        log.error("the engine is hung (%s); its stacks, where it can still show them, follow", why)
        if not process.stopped:
            process.show_stacks()
            await asyncio.sleep(STACK_SECONDS)
        process.kill()

    def _longest_load(self) -> float:
        return LOAD_SECONDS + SLOW_LOADS * self._client.ready.result().load_seconds
