"""Sleep: the engine's process is ended, so that others have its memory, a GPU's too; another begins when it is wanted.

    awake ── fall() ──▶ drowsy: no new requests, those that run have --drain-timeout ──▶ asleep: there is no process
      ▲                   │ wake()                                                          │ wake()
      └───────────────────┴─────────────── ready ◀── another process, as after a death ◀────┘

Connections, stored responses, keys and their limits stay; the prefix cache is gone. The weights lie in the page cache
of the system, as long as that has no better use for it, so that waking up takes what a restart takes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

from server.admission import Admission
from server.drain import drain, until
from server.engine_client import EngineClient
from server.errors import Unavailable

log = logging.getLogger("octavo.engine")


class Engines(Protocol):
    """A Supervisor, as far as this file cares."""

    async def dismiss(self) -> None:
        """End the process, and begin no other. Returns when its memory is free."""

    def call(self) -> None:
        """There is to be a process again."""


class Sleep:
    """Of one server. Used on the event loop's thread only."""

    def __init__(self, client: EngineClient, admission: Admission, engines: Engines, seconds: float) -> None:
        """`seconds`: that requests have to end in before the engine does."""
        self.on = False
        """No new request is taken."""
        self._client = client
        self._admission = admission
        self._engines = engines
        self._seconds = seconds
        self._falling: asyncio.Task[None] | None = None

    async def fall(self) -> None:
        """Returns when there is no engine any more. Raises Unavailable where there was none that could be ended, or
        somebody woke it meanwhile. Goes on where the caller no longer waits."""
        if not self.on:
            if self._falling is not None or not self._client.serving:
                raise Unavailable("There is no engine that could be put to sleep; try again later.")
            self.on = True
            self._falling = asyncio.create_task(self._fall(), name="sleep")
        if self._falling is not None:
            await asyncio.shield(self._falling)
        if not self.on:
            raise Unavailable("The server does not sleep: it was woken, or its engine had just ended.")

    def wake(self) -> None:
        """Take requests again. They wait for the engine, as after a death."""
        if self.on:
            self.on = False
            if not self._client.serving:
                self._client.expect()
            self._engines.call()

    async def awake(self) -> None:
        """`wake`, and return when an engine serves, or will not."""
        self.wake()
        await until(lambda: self.on or self._client.serving or self._client.gone.is_set(), math.inf)

    async def _fall(self) -> None:
        client, requests = self._client, self._admission.requests
        try:
            log.info("going to sleep: %d requests in flight, at most %g s", requests, self._seconds)
            message = "The server was put to sleep before this request was finished."
            await drain(client, self._admission, self._seconds, message, lambda: not self.on)
            if self.on and client.serving:
                await self._engines.dismiss()
                log.info("asleep: the engine has ended")
            else:  # somebody woke it, or it died and the next one is on its way
                self.on = False
        finally:
            self._falling = None
