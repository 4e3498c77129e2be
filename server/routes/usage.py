"""GET /usage: an admin key sees what everybody has used, another key what it has; without keys there is one line."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from server.key_file import ApiKey
from server.service import service_of

router = APIRouter()


@router.get("/usage")
async def usage(http: Request) -> Response:
    """Requests and tokens by key, since the server began and by UTC day."""
    service = service_of(http)
    key: ApiKey | None = http.scope["state"].get("key")
    names = {"" if key is None else key.name}
    if key is not None and key.admin:
        names = service.ledger.names | {known.name for known in service.keys.keys}
    lines = [service.ledger.line(name) for name in sorted(names)]
    body = {"object": "list", "since": service.ledger.since, "data": lines}
    return Response(orjson.dumps(body), media_type="application/json")
