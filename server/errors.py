"""Failures of a request: one small hierarchy, and the one place that turns it into an HTTP answer.

A route, or anything it calls, raises a `RequestError`; `app` answers with `error_response`. Inside a stream that has
begun, the same body goes out as an error event. The messages are for clients: no paths, no addresses, no tracebacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

INTERNAL_MESSAGE = "The server failed to answer this request."


class RequestError(Exception):
    """A failure with a status. Subclasses fix status, type and code; `param` is the dotted path of the field."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str | None] = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.headers = dict(headers or {})
        self.numbers = dict(numbers or {})
        """What the message counts, also as fields of the error object (`prompt_tokens`, `max_model_len`, …)."""

    def body(self) -> dict[str, Any]:
        """The OpenAI error object, with its envelope."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.numbers}
        return {"error": error}


class InvalidRequest(RequestError):
    """Bad JSON, wrong type, out of range, mutually exclusive fields."""


class Unsupported(RequestError):
    """A field or value that OpenAI or another server knows and this one does not honour."""

    default_code = "unsupported_parameter"


class ContextTooLong(RequestError):
    """Prompt, or prompt plus max_tokens, exceeds the model's context."""

    default_code = "context_length_exceeded"


class CapacityExceeded(RequestError):
    """The request could never fit the KV pool."""

    default_code = "kv_capacity_exceeded"


class TemplateError(RequestError):
    """The chat template refused the messages, or failed on them."""

    default_code = "template_error"


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class NotFound(RequestError):
    """Unknown model or route."""

    status = 404
    default_code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    default_code = "method_not_allowed"


class DeadlineExceeded(RequestError):
    """--request-timeout passed, or the body came too slowly."""

    status = 408
    type = "timeout_error"
    default_code = "timeout"


class PayloadTooLarge(RequestError):
    status = 413
    default_code = "payload_too_large"


class UnsupportedMediaType(RequestError):
    status = 415
    default_code = "unsupported_media_type"


class Overloaded(RequestError):
    """The queue is full; the client should come back after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"
    default_code = "server_overloaded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after)})


class EngineError(RequestError):
    """The engine failed on this request."""

    status = 500
    type = "server_error"
    default_code = "engine_error"


class Unavailable(RequestError):
    """Loading, draining, or without an engine."""

    status = 503
    type = "server_error"
    default_code = "unavailable"

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after)})


def internal_error() -> EngineError:
    """What a client learns of an exception that nobody foresaw."""
    return EngineError(INTERNAL_MESSAGE, code="internal_error")


def error_response(error: RequestError) -> Response:
    """The HTTP answer to a failed request."""
    return Response(
        orjson.dumps(error.body()), status_code=error.status, headers=error.headers, media_type="application/json"
    )
