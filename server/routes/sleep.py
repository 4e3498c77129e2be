"""POST /sleep, POST /wake_up, GET /is_sleeping: the engine's memory is given back for a while. See `server.sleep`.

The two that change something want an admin key, where there are keys.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from server.body import check_media_type
from server.errors import Forbidden, InvalidRequest, NotFound
from server.key_file import ApiKey
from server.service import Service, service_of
from server.sleep import Sleep

router = APIRouter()
LEVELS = ("1", "2")
"""vLLM's. Both end the engine's process, so that nothing of its memory is left to tell them apart."""


def _sleep(http: Request, service: Service) -> Sleep:
    """Whoever asks may have it. Raises Forbidden, NotFound."""
    check_media_type(http)
    key: ApiKey | None = http.scope["state"].get("key")
    if key is not None and not key.admin:
        raise Forbidden("This needs a key of --api-keys-file with `admin: true`.")
    if service.sleep is None:
        raise NotFound("Sleep mode is off; the server was started without --enable-sleep-mode.")
    return service.sleep


def _answer(service: Service) -> Response:
    body = {"is_sleeping": service.state == "asleep"}
    return Response(orjson.dumps(body), media_type="application/json")


@router.post("/sleep")
async def sleep(http: Request) -> Response:
    """End the engine once running requests have ended, at the latest after --drain-timeout; answers when its memory is
    free."""
    service = service_of(http)
    asleep = _sleep(http, service)
    level = http.query_params.get("level", LEVELS[0])
    if level not in LEVELS:
        raise InvalidRequest("level: must be 1 or 2", param="level")
    await asleep.fall()
    return _answer(service)


@router.post("/wake_up")
async def wake_up(http: Request) -> Response:
    """Start the engine again; answers when it serves."""
    service = service_of(http)
    await _sleep(http, service).awake()
    service.require()
    return _answer(service)


@router.get("/is_sleeping")
async def is_sleeping(http: Request) -> Response:
    """Whether the server sleeps, or is about to."""
    return _answer(service_of(http))
