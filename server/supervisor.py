"""Watches the engine process and ends it. Restarting it, with the live streams resubmitted, belongs here."""

from __future__ import annotations

import asyncio

from scheduler.config import EngineConfig
from server.engine_client import EngineClient
from server.engine_process import EngineProcess


class Supervisor:
    """Talks to the engine process through the client."""

    def __init__(self, client: EngineClient, config: EngineConfig, process: EngineProcess) -> None:
        self._client = client
        self._config = config
        self._process = process
        self._conversation: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send the configuration, and begin to listen."""
        self._conversation = asyncio.create_task(self._client.run(self._process.sock, self._config), name="engine")

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """Of the engine process; None while it runs."""
        return self._process.status

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    async def stop(self) -> None:
        """Hang up, wait, and kill what does not end."""
        self._client.close()
        if self._conversation is not None:
            await self._conversation
        await self._process.stop()
