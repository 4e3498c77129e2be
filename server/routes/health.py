"""Probes. They read flags, take no time, and never wait for the engine.

/health   the process and its engine work, or soon will       503: loading, dead, hung
/ready    and it takes new requests                           503: draining, asleep, restarting the engine too
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from server.service import service_of
from server.version import VERSION

router = APIRouter()


def _state(state: str, healthy: frozenset[str]) -> Response:
    status = 200 if state in healthy else 503
    headers = {"Retry-After": "5"} if status == 503 else {}
    return Response(orjson.dumps({"status": state}), status, headers=headers, media_type="application/json")


@router.head("/health", include_in_schema=False)
@router.get("/livez", include_in_schema=False)
@router.get("/healthz", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.get("/health")
async def health(http: Request) -> Response:
    """Alive: 503 until the model is loaded, while the engine is hung, and where it is dead and no other is coming."""
    return _state(service_of(http).state, frozenset({"ready", "draining", "restarting", "asleep"}))


@router.head("/ready", include_in_schema=False)
@router.get("/readyz", include_in_schema=False)
@router.get("/ready")
async def ready(http: Request) -> Response:
    """Taking requests: also 503 while the server drains, puts another engine in the place of a dead one, or sleeps and
    no request may wake it."""
    service = service_of(http)
    return _state(service.state, frozenset({"ready", "asleep"} if service.settings.wake_on_request else {"ready"}))


@router.get("/version")
async def version() -> Response:
    """Of this server."""
    return Response(orjson.dumps({"version": VERSION}), media_type="application/json")
