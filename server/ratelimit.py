"""The layer that gives every request its lease, and refuses those whose key has used up what it may.

    Requests ──▶ ApiKeys: key ──▶ RateLimits: lease ── 429, before the body is read ──▶ the application

What a limited key has left stands in the head of every answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import RateLimited, error_response
from server.key_file import ApiKey
from server.lease import Lease, Limits
from server.ledger import Ledger


class RateLimits:
    """Gives every request its lease, as `lease` in the scope's state. Only what may have a body counts as a request:
    a GET asks for next to nothing."""

    def __init__(
        self,
        app: ASGIApp,
        ledger: Ledger,
        rejected: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rejected`: counts refusals by reason."""
        self._app = app
        self._ledger = ledger
        self._rejected = rejected
        self._clock = clock
        self._limits: dict[str, Limits] = {}

    def limits(self, key: ApiKey) -> Limits:
        """The state of a key's limits."""
        now = self._clock()
        limits = self._limits.get(key.name)
        if limits is None:
            limits = self._limits[key.name] = Limits()
        limits.adopt(key, now)
        return limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        key = state.get("key")
        lease = Lease(None if key is None else self.limits(key), self._ledger, self._clock)
        state["lease"] = lease

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *lease.answered(message["status"])]
            await send(message)

        try:
            if scope["method"] == "POST":
                try:
                    lease.enter()
                except RateLimited as error:
                    self._rejected[error.reason] += 1
                    await error_response(error, scope["path"])(scope, receive, answer)
                    return
            await self._app(scope, receive, answer)
        finally:
            lease.close()
