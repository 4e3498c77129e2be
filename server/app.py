"""The application: routes, the mapping of every failure to an answer, the OpenAPI document, the outer layers."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from server.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestError,
    error_response,
    internal_error,
)
from server.exposition import make_registry
from server.keys import ApiKeys
from server.middleware import CLIENT_GONE, QUIET_PATHS, Requests
from server.openapi import OPERATIONS, document
from server.ratelimit import RateLimits
from server.routes import (
    chat,
    completions,
    docs,
    embeddings,
    health,
    messages,
    metrics,
    models,
    responses,
    sleep,
    tokens,
    usage,
)
from server.service import Service
from server.version import VERSION

MODULES = (completions, chat, responses, messages, embeddings, models, tokens, health, metrics, usage, sleep, docs)
ROUTERS = [module.router for module in MODULES]
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(
        title="Octavo",
        version=VERSION,
        redirect_slashes=False,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        # Spans are ours (`server.tracing`); FastAPI's would hold the texts of exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = service
    app.state.registry = make_registry(service)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    for method, path in OPERATIONS:
        if path not in QUIET_PATHS:
            service.metrics.expect_http(path.replace("{id}", "{id:path}") if "models" in path else path, method.upper())
    limited = RateLimits(app, service.ledger, service.admission.rejected, service.clock)
    known = ApiKeys(limited, service.keys, service.settings.protect_metrics)
    return Requests(known, service.metrics, service.admission, service.tracer, service.settings.log_requests)


async def _answer_error(http: Request, failure: Exception) -> Response:
    """Every failure in the one shape. What nobody foresaw goes on, after this, to the log of `middleware.Requests`."""
    path = http.scope["path"]
    if isinstance(failure, Overloaded):
        http.app.state.service.admission.rejected[failure.reason] += 1
    if isinstance(failure, RequestError):
        return error_response(failure, path)
    if isinstance(failure, RequestValidationError):
        return error_response(InvalidRequest("The request is not valid."), path)
    if not isinstance(failure, HTTPException):
        return error_response(internal_error(), path)
    where = f"{http.method} {http.scope['path'][:128]}"
    if failure.status_code == 405:
        every = [*ROUTES, *(route for route in http.app.routes if isinstance(route, Route))]  # /openapi.json is its own
        fits = [route for route in every if route.matches(http.scope)[0] != Match.NONE]
        methods = {name for route in fits for name in route.methods or ()}
        allowed = {"Allow": ", ".join(sorted(methods | {"OPTIONS"}))}
        if http.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        return error_response(MethodNotAllowed(f"{where}: the route does not take this method.", headers=allowed), path)
    return error_response(NotFound(f"{where}: there is no such route; /docs lists them."), path)


async def _answer_nobody(http: Request, failure: Exception) -> Response:
    """The client has gone; the status is for the log."""
    return Response(status_code=CLIENT_GONE)
