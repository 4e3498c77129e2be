"""How a generation becomes an HTTP answer, whole or streamed, and what happens when its client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.errors import RequestError, internal_error
from server.generation import Generation
from server.sse import EventStream, error_frames

log = logging.getLogger("octavo.answer")

T = TypeVar("T")


class Answer(Protocol):
    """One endpoint's way to answer."""

    generation: Generation

    async def start(self) -> None:
        """Tokenise, check, submit: whatever the client did wrong is raised here."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """The chunks, several in one where they came in one step. Raises what the generation failed with."""

    async def whole(self) -> bytes:
        """The whole answer as JSON."""


async def respond(
    http: Request, answer: Answer, stream: bool, failed: Callable[[RequestError], bytes] = error_frames
) -> Response:
    """Run it. The generation is closed when the response has been sent, or could not be.

    `failed`: how a stream of this kind ends that has begun and fails.
    """
    try:
        if stream:
            await until_disconnect(http, answer.start())
            return EventStream(_safe(answer, failed), answer.generation.close)
        body = await until_disconnect(http, _run(answer))
    except BaseException:
        answer.generation.close()
        raise
    answer.generation.close()
    return Response(body, media_type="application/json")


async def until_disconnect(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancels it as soon as the client has gone. Raises ClientDisconnect.

    Starlette cancels no handler by itself. The body must have been read, so that all that `receive` can bring is the
    disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _run(answer: Answer) -> bytes:
    await answer.start()
    return await answer.whole()


async def _safe(answer: Answer, failed: Callable[[RequestError], bytes]) -> AsyncGenerator[bytes, None]:
    """The frames; a failure in the middle becomes the last event."""
    try:
        async for frame in answer.frames():
            yield frame
    except RequestError as error:
        yield failed(error)
    except Exception:
        log.exception("a stream failed")
        yield failed(internal_error())
