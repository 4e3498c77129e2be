"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

router = APIRouter()


@router.get("/metrics")
async def scrape(http: Request) -> Response:
    """In Prometheus' text format, or OpenMetrics where the scraper asks for it."""
    registry = http.app.state.registry
    assert isinstance(registry, CollectorRegistry)
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
