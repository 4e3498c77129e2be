"""Every failure has its status, type and code, and the headers that clients act on."""

from __future__ import annotations

import json

import pytest

from server.errors import (
    AuthenticationError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestError,
    Unavailable,
    error_response,
)

LATER = {"Retry-After": "5", "retry-after-ms": "5000"}


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "headers"),
    [
        (InvalidRequest("m"), 400, "invalid_request_error", "invalid_value", {}),
        (AuthenticationError("m"), 401, "authentication_error", "invalid_api_key", {"www-authenticate": "Bearer"}),
        (NotFound("m", code="model_not_found"), 404, "invalid_request_error", "model_not_found", {}),
        (DeadlineExceeded("m"), 408, "timeout_error", "timeout", {}),
        (
            Overloaded("m", retry_after=6.2, reason="max_body_bytes"),
            429,
            "rate_limit_error",
            "server_overloaded",
            {"retry-after": "7", "retry-after-ms": "6200"},
        ),
        (
            RateLimited("m", retry_after=0.02, reason="x"),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"retry-after": "1"},
        ),
        (EngineError("m"), 500, "server_error", "engine_error", {}),
        (Unavailable("m"), 503, "server_error", "unavailable", {"retry-after": "5", "retry-after-ms": "5000"}),
        (Unavailable("m", retry_after=2), 503, "server_error", "unavailable", {"retry-after": "2"}),
    ],
)
def test_answer(error: RequestError, status: int, type: str, code: str, headers: dict[str, str]) -> None:
    response = error_response(error)
    assert response.status_code == status
    assert json.loads(bytes(response.body))["error"] == {"message": "m", "type": type, "param": None, "code": code}
    assert headers.items() <= dict(response.headers).items()
    assert ("retry-after" in response.headers) == ("retry-after" in headers)


def test_one_failure_s_headers_and_code_are_not_the_next_one_s() -> None:
    first = Unavailable("m", code="draining", headers={"Allow": "GET"})
    first.headers["Connection"] = "close"
    assert first.headers == {**LATER, "Allow": "GET", "Connection": "close"}
    second = Unavailable("m")
    assert (second.code, second.headers) == ("unavailable", LATER)
