"""Failures of a request: one small hierarchy, and the one place that turns it into an HTTP answer.

A route, or anything it calls, raises a `RequestError`; `app` answers with `error_response`. Inside a stream that has
begun, the same body goes out as an error event. The messages are for clients: no paths, no addresses, no tracebacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

ANTHROPIC_PATH = "/v1/messages"
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a pair, which is no character."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status, what Anthropic calls a failure."""
REFUSALS = (
    *("max_queued_requests", "max_queued_tokens", "max_body_bytes", "grammar_checkers"),
    *("requests_per_minute", "tokens_per_minute", "max_concurrency"),
)
"""Why there are answers with 429: by the server as a whole, by a key's limits."""
INTERNAL_MESSAGE = "The server failed to answer this request."
UNAVAILABLE_SECONDS = 5.0
"""A guess at how long a server goes without an engine."""


class RequestError(Exception):
    """A failure with a status; `param` is the dotted path of the field.

    A kind of failure is a subclass and fixes status, type and headers, and the code unless one is raised with another.
    """

    status: ClassVar[int]
    type: ClassVar[str]
    code: str
    headers: dict[str, str]

    def __init_subclass__(
        cls, status: int, code: str, type: str = "invalid_request_error", headers: Mapping[str, str] | None = None
    ) -> None:
        cls.status, cls.type, cls.code, cls.headers = status, type, code, dict(headers or {})

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
        self.message = SURROGATE.sub("\ufffd", message)
        self.param = param
        self.code = code or self.code
        self.headers = {**self.headers, **(headers or {})}
        self.numbers = dict(numbers or {})
        """What the message counts, also as fields of the error object (`prompt_tokens`, `max_model_len`, …)."""

    def body(self) -> dict[str, Any]:
        """The OpenAI error object, with its envelope."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.numbers}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's error object, for the routes that speak its protocol. It has no place for `param` and `code`, so
        that they are extra."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code, **self.numbers}
        return {"type": "error", "error": error}


class InvalidRequest(RequestError, status=400, code="invalid_value"):
    """Bad JSON, wrong type, out of range, mutually exclusive fields."""


class Unsupported(RequestError, status=400, code="unsupported_parameter"):
    """A field or value that OpenAI or another server knows and this one does not honour."""


class ContextTooLong(RequestError, status=400, code="context_length_exceeded"):
    """Prompt, or prompt plus max_tokens, exceeds the model's context."""


class CapacityExceeded(RequestError, status=400, code="kv_capacity_exceeded"):
    """The request could never fit the KV pool."""


class InvalidGrammar(RequestError, status=400, code="invalid_grammar"):
    """A schema, regex or grammar that is wrong, cannot be enforced, or takes too long to compile."""


class TemplateError(RequestError, status=400, code="template_error"):
    """The chat template refused the messages, or failed on them."""


class AuthenticationError(
    RequestError,
    status=401,
    code="invalid_api_key",
    type="authentication_error",
    headers={"WWW-Authenticate": "Bearer"},
):
    """No key, or a wrong one."""


class Forbidden(RequestError, status=403, code="admin_key_required", type="permission_error"):
    """The key may not do that."""


class NotFound(RequestError, status=404, code="not_found"):
    """Unknown model or route."""


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed"):
    """The route knows other methods."""


class DeadlineExceeded(RequestError, status=408, code="timeout", type="timeout_error"):
    """--request-timeout passed, or the body came too slowly."""


class PayloadTooLarge(RequestError, status=413, code="payload_too_large"):
    """The body is larger than the server reads."""


class UnsupportedMediaType(RequestError, status=415, code="unsupported_media_type"):
    """The body is no JSON by its content-type."""


class Overloaded(RequestError, status=429, code="server_overloaded", type="rate_limit_error"):
    """The queue is full; the client should come back after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float, reason: str) -> None:
        """`reason`: one of REFUSALS, by which it is counted where it is answered."""
        super().__init__(message, headers=retry_headers(retry_after))
        self.reason = reason


class RateLimited(Overloaded, status=429, code="rate_limit_exceeded", type="rate_limit_error"):
    """The key has used up what it may; it has more in `retry_after` seconds."""


class EngineError(RequestError, status=500, code="engine_error", type="server_error"):
    """The engine failed on this request."""


class Unavailable(RequestError, status=503, code="unavailable", type="server_error"):
    """Loading, draining, restarting, or without an engine; worth another try after `retry_after` seconds."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after: float = UNAVAILABLE_SECONDS,
    ) -> None:
        super().__init__(message, code=code, headers={**retry_headers(retry_after), **(headers or {})})


def retry_headers(seconds: float) -> dict[str, str]:
    """When to come back: for HTTP, in whole seconds and never at once, and for the SDKs of OpenAI, which look at
    milliseconds first."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def internal_error() -> EngineError:
    """What a client learns of an exception that nobody foresaw."""
    return EngineError(INTERNAL_MESSAGE, code="internal_error")


def error_response(error: RequestError, path: str = "") -> Response:
    """The HTTP answer to a failed request; `path` of its URL, on which the shape depends."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return Response(
        orjson.dumps(error.anthropic() if anthropic else error.body()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
