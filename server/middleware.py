"""Around every request, as pure ASGI: its id, its line in the log, its count, the bytes of its body.

Requests ── id, log, count, bytes ──▶ keys.ApiKeys ── 401 ──▶ ratelimit.RateLimits ── 429 ──▶ the application
"""

from __future__ import annotations

import logging
import time
import uuid

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import Admission
from server.metrics import Metrics

log = logging.getLogger("octavo.access")

OPEN_PATHS = frozenset({"/health", "/healthz", "/livez", "/ready", "/readyz", "/ping"})
QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Neither counted nor logged, except at the level debug: probes and scrapes."""
MAX_ID_LENGTH = 128
CLIENT_GONE = 499
UNMATCHED = "none"
"""Label of requests that no route took: paths are the client's words."""


def request_id(given: str | None) -> str:
    """The client's id where it is short and printable, else a new one. Used in headers and logs, never as a key."""
    if given and len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class Requests:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, admission: Admission) -> None:
        self._app = app
        self._metrics = metrics
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        id = request_id(Headers(scope=scope).get("x-request-id"))
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        status = held = 0
        complete = False

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began) * 1000))
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def hear() -> Message:
            nonlocal status, held
            message = await receive()
            if message["type"] == "http.request":
                held += self._admission.hold_bytes(len(message.get("body", b"")))
            elif not complete:
                status = CLIENT_GONE
            return message

        try:
            await self._app(scope, hear, answer)
        except (ClientDisconnect, SendTimeoutError, ConnectionError):
            status = CLIENT_GONE
        except Exception:
            # The application has answered, if it still could.
            log.exception("request %s failed", id)
        finally:
            self._admission.free_bytes(held)
            self._note(scope, id, status or CLIENT_GONE, time.perf_counter() - began)

    def _note(self, scope: Scope, id: str, status: int, seconds: float) -> None:
        path, method = scope["path"], scope["method"]
        quiet = path in QUIET_PATHS
        if status == CLIENT_GONE:
            self._metrics.disconnects += 1
        route = getattr(scope.get("route"), "path", UNMATCHED)
        if not quiet:
            self._metrics.count_http(route, method, status)
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d %.1f ms id=%s",
            method,
            ascii(path[:128])[1:-1],
            status,
            seconds * 1000,
            id,
        )
