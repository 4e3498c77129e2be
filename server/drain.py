"""A drain: what runs may end; after some seconds the rest is ended, with an error that its clients can read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.admission import Admission
from server.engine_client import EngineClient
from server.errors import Unavailable

CLOSE_SECONDS = 1
"""For failed requests to tell their clients, and for connections to end once their answers are complete."""


async def drain(
    client: EngineClient, admission: Admission, seconds: float, message: str, given_up: Callable[[], bool]
) -> None:
    """Until no request is left, at most `seconds` and a moment, or until it is `given_up`. `message`: for those whose
    time was over. Somebody else sees to it that no new ones are taken."""
    if not await until(lambda: not admission.requests or given_up(), seconds):
        for stream in list(client.live.values()):
            client.fail(stream, Unavailable(message))
        await until(lambda: not admission.requests, CLOSE_SECONDS)


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time. Looks every 20 ms: nothing that waits here is a hot path."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True
