"""The OpenAPI document. Routes read bodies and write answers themselves, so it is put together from this table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema

from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.messages import CountRequest, MessagesRequest
from server.protocol.responses import InputFields, ResponseRequest
from server.protocol.tokens import DetokenizeRequest, PromptRequest, TokenizeChatRequest, TokenizeRequest
from server.shapes import INTEGER, SHAPES, STRING, Schema, constant, ref


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one path takes and gives."""

    answer: str
    """Name of a schema in `server.shapes`; a media type where it is no JSON."""
    bodies: tuple[type[BaseModel], ...] = ()
    streams: str | None = None
    """Name of the schema of what it sends in events, where `stream` is true."""
    known: bool = False
    """May not know what the path names."""
    probe: bool = False
    """Open to everybody, and 503 is an answer."""
    admin: bool = False
    """Wants an admin key, where there are keys."""
    query: tuple[tuple[str, Schema], ...] = ()
    error: str = "Error"


PAGE = (
    ("order", constant("asc", "desc")),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    ("after", STRING),
)
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation("Completion", (CompletionRequest,), streams="CompletionChunk"),
    ("post", "/v1/chat/completions"): Operation("ChatCompletion", (ChatRequest,), streams="ChatCompletionChunk"),
    ("post", "/v1/chat/completions/input_tokens"): Operation("ChatTokens", (PromptRequest,)),
    ("post", "/v1/responses"): Operation("Response", (ResponseRequest,), streams="ResponseStream"),
    ("post", "/v1/responses/input_tokens"): Operation("ResponseInputTokens", (InputFields,)),
    ("get", "/v1/responses/{id}"): Operation("Response", known=True, query=(("stream", constant("false")),)),
    ("delete", "/v1/responses/{id}"): Operation("ResponseDeleted", known=True),
    ("post", "/v1/responses/{id}/cancel"): Operation("Response", known=True),
    ("get", "/v1/responses/{id}/input_items"): Operation("ResponseItems", known=True, query=PAGE),
    ("post", "/v1/messages"): Operation(
        "AnthropicMessage", (MessagesRequest,), streams="AnthropicStream", error="AnthropicError"
    ),
    ("post", "/v1/messages/count_tokens"): Operation("AnthropicTokens", (CountRequest,), error="AnthropicError"),
    ("post", "/v1/embeddings"): Operation("Embeddings", (EmbeddingRequest,)),
    ("get", "/v1/models"): Operation("Models"),
    ("get", "/v1/models/{id}"): Operation("Model", known=True),
    ("post", "/tokenize"): Operation("Tokens", (TokenizeRequest, TokenizeChatRequest)),
    ("post", "/detokenize"): Operation("Text", (DetokenizeRequest,)),
    ("post", "/apply-template"): Operation("Prompt", (PromptRequest,)),
    ("get", "/health"): Operation("State", probe=True),
    ("get", "/ready"): Operation("State", probe=True),
    ("get", "/version"): Operation("Version"),
    ("get", "/metrics"): Operation("text/plain"),
    ("get", "/usage"): Operation("UsageReport"),
    ("post", "/sleep"): Operation("Sleeping", admin=True, query=(("level", constant("1", "2")),)),
    ("post", "/wake_up"): Operation("Sleeping", admin=True),
    ("get", "/is_sleeping"): Operation("Sleeping"),
}
BODY_REFUSALS = {
    "400": "A fault of the request; `param` names the field.",
    "404": "No such model, or nothing stored under such an id.",
    "408": "The body came too slowly, or the request ran into --queue-timeout or --request-timeout.",
    "413": "The body is too large.",
    "415": "The body is no JSON by its content-type, or it is compressed.",
    "429": "The queue is full, or the key has used up what it may; see Retry-After.",
    "500": "The engine failed on this request.",
    "503": "Loading, draining, asleep, or without an engine; see Retry-After.",
}
UNKNOWN = {"400": "A fault of the request; `param` names the field.", "404": "There is none of this id."}
ADMIN = {
    "400": "A fault of the request; `param` names the field.",
    "403": "The key is no admin.",
    "404": "Sleep mode is off.",
    "415": "The request has a content type that is not JSON.",
    "503": "The engine cannot be put to sleep, or not be woken; see Retry-After.",
}
KEY = {"401": "No key, or a wrong one."}
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]


class Schemas(GenerateJsonSchema):
    """Where one of our validators comes before a number's bounds, pydantic writes them by its own names."""

    def generate_inner(self, schema: CoreSchema) -> JsonSchemaValue:
        made = super().generate_inner(schema)
        return {{"ge": "minimum", "le": "maximum"}.get(name, name): value for name, value in made.items()}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; the same object every time."""
    if app.openapi_schema is None:
        whole = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = {model for operation in OPERATIONS.values() for model in operation.bodies}
        _, definitions = models_json_schema(
            [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
            ref_template="#/components/schemas/{model}",
            schema_generator=Schemas,
        )
        whole["components"] = {
            "schemas": SHAPES | definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        }
        for path, methods in whole["paths"].items():
            for method, described in methods.items():
                _complete(described, method, OPERATIONS[method, path])
        app.openapi_schema = whole
    return app.openapi_schema


def _complete(described: dict[str, Any], method: str, operation: Operation) -> None:
    if operation.bodies:
        schema = _either([ref(model.__name__) for model in operation.bodies])
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    for name, shape in operation.query:
        parameter = {"name": name, "in": "query", "required": False, "schema": shape}
        described.setdefault("parameters", []).append(parameter)
    described["responses"] = {"200": _answer(operation)}
    refusals = BODY_REFUSALS if operation.bodies else UNKNOWN if operation.known else ADMIN if operation.admin else {}
    if operation.probe:
        described["responses"]["503"] = _answer(operation)
    else:
        described["security"] = SECURITY
        refusals = {**refusals, **KEY}
        if method == "post":  # each counts as a request of its key
            refusals["429"] = BODY_REFUSALS["429"]
    for status, text in sorted(refusals.items()):
        described["responses"][status] = {
            "description": text,
            "content": {"application/json": {"schema": ref(operation.error)}},
        }
        if status in ("429", "503"):
            described["responses"][status]["headers"] = {"Retry-After": {"schema": INTEGER}}


def _answer(operation: Operation) -> dict[str, Any]:
    if "/" in operation.answer:
        return {"description": "The answer.", "content": {operation.answer: {"schema": STRING}}}
    content: dict[str, Any] = {"application/json": {"schema": ref(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": ref(f"{operation.streams}Event")}
    return {"description": "The answer.", "content": content}


def _either(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
