"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.service import Service, service_of

router = APIRouter()


def card(service: Service, name: str) -> dict[str, Any]:
    """One entry. Aliases name the model they stand for. Token ids from `vocab_size` on are refused in prompts."""
    loaded = service.loaded
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.names[0],
        "parent": None,
        "max_model_len": loaded.ready.max_model_len if loaded is not None else None,
        "vocab_size": min(loaded.ready.vocab_size, loaded.tokenizer.vocab_size) if loaded is not None else None,
    }


@router.get("/v1/models")
async def list_models(http: Request) -> Response:
    """The served model, under each of its names."""
    service = service_of(http)
    return _json({"object": "list", "data": [card(service, name) for name in service.names]})


@router.get("/v1/models/{id:path}")
async def retrieve_model(http: Request, id: str) -> Response:
    """One model; its id may hold slashes."""
    service = service_of(http)
    return _json(card(service, service.check_model(id)))


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
