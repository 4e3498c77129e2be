"""The application: routes, the mapping of every failure to an answer, the OpenAPI document, the outer layers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from server.errors import InvalidRequest, MethodNotAllowed, NotFound, RequestError, error_response, internal_error
from server.exposition import make_registry
from server.middleware import CLIENT_GONE, ApiKeys, Requests
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.errors import ErrorBody
from server.protocol.responses import InputFields, ResponseRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from server.routes import chat, completions, embeddings, health, metrics, models, responses, tokens
from server.service import Service
from server.version import VERSION

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/responses": (ResponseRequest,),
    "/v1/responses/input_tokens": (InputFields,),
    "/v1/embeddings": (EmbeddingRequest,),
    "/tokenize": (TokenizeRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
}
"""What each route reads. Routes parse their bodies themselves, so FastAPI has to be told."""
ROUTERS = [module.router for module in (completions, chat, responses, embeddings, models, tokens, health, metrics)]
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]
REFUSALS = {
    "400": "A fault of the request; `error.param` names the field.",
    "401": "No key, or a wrong one.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "The queue is full; see Retry-After.",
    "503": "Loading, draining, or without an engine; see Retry-After.",
}


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="Octavo", version=VERSION, redirect_slashes=False, openapi_url="/openapi.json", redoc_url=None)
    app.state.service = service
    app.state.registry = make_registry(service)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    for path in BODIES:
        service.metrics.expect_http(path, "POST")
    service.metrics.expect_http("/v1/models", "GET")
    keys = [key.get_secret_value() for key in service.settings.api_key]
    return Requests(ApiKeys(app, keys, service.settings.protect_metrics), service.metrics, service.admission)


async def _answer_error(http: Request, failure: Exception) -> Response:
    """Every failure in the one shape. What nobody foresaw goes on, after this, to the log of `middleware.Requests`."""
    if isinstance(failure, RequestError):
        return error_response(failure)
    if isinstance(failure, RequestValidationError):
        return error_response(InvalidRequest("The request is not valid."))
    if not isinstance(failure, HTTPException):
        return error_response(internal_error())
    where = f"{http.method} {http.scope['path'][:128]}"
    if failure.status_code == 405:
        fits = [route for route in ROUTES if route.matches(http.scope)[0] != Match.NONE]
        methods = {name for route in fits for name in route.methods or ()}
        allowed = {"Allow": ", ".join(sorted(methods | {"OPTIONS"}))}
        if http.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        return error_response(MethodNotAllowed(f"{where}: the route does not take this method.", headers=allowed))
    return error_response(NotFound(f"{where}: there is no such route."))


async def _answer_nobody(http: Request, failure: Exception) -> Response:
    """The client has gone; the status is for the log."""
    return Response(status_code=CLIENT_GONE)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [(model, "validation") for group in BODIES.values() for model in group]
        _, definitions = models_json_schema(
            [*bodies, (ErrorBody, "validation")],  # type: ignore[list-item]
            ref_template="#/components/schemas/{model}",
        )
        document["components"] = {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)  # FastAPI's own; ours is 400
        for path, group in BODIES.items():
            references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in group]
            operation = document["paths"][path]["post"]
            schema = references[0] if len(references) == 1 else {"anyOf": references}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation["security"] = [{"key": []}]
            body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
            operation["responses"] |= {
                status: {"description": text, "content": body} for status, text in REFUSALS.items()
            }
        app.openapi_schema = document
    return app.openapi_schema
