"""Around every request, as pure ASGI: its id, its line in the log, its count, the bytes of its body.

Requests ── id, log, count, bytes ──▶ keys.ApiKeys ── 401 ──▶ ratelimit.RateLimits ── 429 ──▶ the application
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import Admission
from server.metrics import Metrics
from server.record import RECORD, Record
from server.tracing import Tracer

log = logging.getLogger("octavo.access")

OPEN_PATHS = frozenset({"/health", "/healthz", "/livez", "/ready", "/readyz", "/ping"})
QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Neither counted nor logged, except at the level debug: probes and scrapes."""
MAX_ID_LENGTH = 128
MAX_LOGGED_BODY = 4096
"""Bytes of each body that --log-requests shows."""
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

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        admission: Admission,
        tracer: Tracer | None = None,
        log_bodies: bool = False,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._admission = admission
        self._tracer = tracer
        self._log_bodies = log_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        record = Record(request_id(headers.get("x-request-id")), scope["method"][:32], ascii(scope["path"][:128])[1:-1])
        status = held = 0
        complete = False
        body = b""

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = record.id
                answered["openai-processing-ms"] = str(round((time.perf_counter() - record.began) * 1000))
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def hear() -> Message:
            nonlocal status, held, body
            message = await receive()
            if message["type"] == "http.request":
                part = message.get("body", b"")
                held += self._admission.hold_bytes(len(part))
                if self._log_bodies:
                    body += part[: MAX_LOGGED_BODY - len(body)]
            elif not complete:
                status = CLIENT_GONE
            return message

        known = RECORD.set(record)
        try:
            await self._app(scope, hear, answer)
        except (ClientDisconnect, ConnectionError):
            status = CLIENT_GONE
        except Exception:
            # The application has answered, if it still could.
            log.exception("request %s failed", record.id)
        finally:
            RECORD.reset(known)
            self._admission.free_bytes(held)
            record.ended(status or CLIENT_GONE)
            self._note(scope, record, headers, body)

    def _note(self, scope: Scope, record: Record, headers: Headers, body: bytes) -> None:
        quiet = scope["path"] in QUIET_PATHS
        if record.status == CLIENT_GONE:
            self._metrics.disconnects += 1
        record.route = getattr(scope.get("route"), "path", None)
        record.key = scope.get("state", {}).get("key_name")
        if not quiet:
            self._metrics.count_http(record.route or UNMATCHED, record.method, record.status)
        level = logging.DEBUG if quiet else logging.INFO
        if log.isEnabledFor(level):
            fields = record.fields()
            if body:
                fields["request_body"] = body.decode("utf-8", "backslashreplace")
            log.log(level, "%(method)s %(path)s %(status)d %(duration_ms).1f ms", fields, extra={"fields": fields})
        if self._tracer is not None and not quiet:
            try:
                self._tracer.send(record, headers)
            except Exception:
                log.exception("no span of request %s", record.id)
