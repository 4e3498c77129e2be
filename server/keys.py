"""The ring of API keys, and the layer that lets only requests with one of them pass.

    --api-key, --api-keys-file ──▶ KeyRing ◀── SIGHUP: the file again
                                     │ find: 401, or the key
    Requests ──▶ ApiKeys ────────────┴──▶ RateLimits ──▶ the application

Paths that are answered without a key are listed; every other needs one, whether a route exists there or not.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import AuthenticationError, error_response
from server.key_file import ApiKey, digest, plain_keys, read_keys
from server.middleware import OPEN_PATHS
from server.settings import BadSettings, Settings

log = logging.getLogger("octavo.keys")


class KeyRing:
    """Every key there is. A key that stands in the file and in --api-key is the file's."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970. Raises BadSettings."""
        self.keys: tuple[ApiKey, ...] = ()
        self._plain = plain_keys(key.get_secret_value() for key in settings.api_key)
        self._file: Path | None = settings.api_keys_file
        self._clock = clock
        self._read()

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self.keys)

    def find(self, sent: str) -> ApiKey:
        """Whose key it is. Raises AuthenticationError where it is nobody's, or no longer anybody's.

        Every key is compared, each in constant time.
        """
        given = digest(sent)
        found = [key for key in self.keys if hmac.compare_digest(given, key.digest)]
        if not found:
            raise AuthenticationError("The API key is missing or wrong.")
        (key,) = found
        if key.expires is not None and self._clock() >= key.expires:
            raise AuthenticationError("The API key has expired.", code="expired_api_key")
        return key

    def reload(self) -> None:
        """Read the file again. Where it is wrong all stays as it was, and a line says so."""
        try:
            self._read()
        except BadSettings as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%d keys, from %s", len(self.keys), self._file or "--api-key")

    def _read(self) -> None:
        listed = read_keys(self._file) if self._file is not None else ()
        unique = {key.digest: key for key in (*self._plain, *listed)}
        self.keys = tuple(unique.values())


class ApiKeys:
    """Lets requests with a key pass, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Without keys, everybody.

    Who is behind it finds the key in the scope's state as `key`, and its name as `key_name`.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, protect_metrics: bool) -> None:
        self._app = app
        self._ring = ring
        self._open = OPEN_PATHS if protect_metrics else OPEN_PATHS | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._ring:
            try:
                key = self._ring.find(_sent_key(Headers(scope=scope)))
            except AuthenticationError as error:
                # The path as it came; never `request.url`, which the Host header can bend.
                if scope["path"] not in self._open:
                    await error_response(error, scope["path"])(scope, receive, send)
                    return
            else:
                scope.setdefault("state", {}).update(key=key, key_name=key.name)
        await self._app(scope, receive, send)


def _sent_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
