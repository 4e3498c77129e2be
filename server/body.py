"""A request's body, bounded in size, time and depth, and read only where the request could be admitted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from model.config_fields import MAX_DEPTH, depth
from server.errors import SURROGATE, DeadlineExceeded, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from server.protocol.base import STRICT, invalid
from server.service import Service

MAX_BODY_BYTES = 32 * 2**20
READ_SECONDS = 60.0
MAX_PARTS = 2**17
"""Strings, keys, arrays and objects in a body. A parser makes a Python object of each with the GIL held, so that what
bounds the length of a body does not bound how long streams wait for it: 32 MiB hold 16 million empty arrays."""
MAX_VALUES = 2**21
"""Values in a body, numbers included; twice as many as any list of token ids may have."""
SCAN_BYTES = 2**18
"""Looked at in one go; between two of them other threads get their turn."""
MAX_SEARCHED = 2**15
"""Parts and values of a broken body that is searched for the field at fault."""
INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that streams do not wait for them."""

M = TypeVar("M", bound=BaseModel)
STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""A JSON string from behind its opening quote up to its closing one."""
_Place = tuple[Any, Any] | None
"""A key, and the place it stands in."""
T = TypeVar("T")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises PayloadTooLarge from the declared length or as soon as a chunked body exceeds the limit,
    DeadlineExceeded where it trickles in, ClientDisconnect where it stops."""
    too_large = PayloadTooLarge(f"body: larger than {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise DeadlineExceeded(f"body: not complete after {READ_SECONDS:.0f} s") from None


def parse_json(body: bytes) -> Any:
    """JSON as RFC 8259 has it: UTF-8, no NaN or Infinity, no lone surrogates, at most MAX_DEPTH deep.

    A body of more than MAX_PARTS or MAX_VALUES is refused before it is parsed.
    """
    if len(body) > MAX_PARTS:
        parts, values = _count(body)
        if parts > MAX_PARTS:
            raise InvalidRequest(f"body: holds more than {MAX_PARTS} strings, keys, arrays and objects")
        if values > MAX_VALUES:
            raise InvalidRequest(f"body: holds more than {MAX_VALUES} values")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _not_json(body, str(error)) from None
    # No more brackets than levels: no need to walk.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise InvalidRequest(f"body: nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    return value


def _count(body: bytes) -> tuple[int, int]:
    """Parts and values of a body of JSON, what strings contain left out; no further than to the first limit."""
    parts, values, at = 0, 1, 0
    while at < len(body) and parts <= MAX_PARTS and values <= MAX_VALUES:
        stop = min(at + SCAN_BYTES, len(body))
        quote = body.find(b'"', at, stop)
        end = stop if quote < 0 else quote
        values += body.count(b",", at, end)
        parts += body.count(b"[", at, end) + body.count(b"{", at, end)
        at = end
        if quote >= 0:
            parts += 1
            at = _string_end(body, quote + 1)
    return parts, values


def _string_end(body: bytes, at: int) -> int:
    """Just past the closing quote of the string whose text begins at `at`, or the end of the body."""
    while found := STRING.match(body, at, at + SCAN_BYTES):
        if found.end() == at or body[found.end() : found.end() + 1] == b'"':
            return found.end() + 1
        at = found.end()
    return len(body)


def _not_json(body: bytes, reason: str) -> InvalidRequest:
    """What is wrong with it, in terms of the field where that can be told."""
    if "surrogate" in reason and (path := _surrogate_path(body)):
        return InvalidRequest(f"{path}: holds half of a surrogate pair", param=path)
    if b"NaN" in body or b"Infinity" in body:
        reason += "; NaN and Infinity are no JSON numbers"
    return InvalidRequest(f"body: not valid JSON: {reason}", code="invalid_json")


def _surrogate_path(body: bytes) -> str | None:
    """Dotted path of a string or key with a lone surrogate, found with the lenient reader; None in a body of too many
    parts to be searched.

    Places are chains of keys, and only one of them is spelled out: a path per entry would take the body's square.
    """
    if sum(_count(body)) > MAX_SEARCHED:
        return None
    try:
        pending: list[tuple[_Place, Any]] = [(None, json.loads(body))]
    except (ValueError, RecursionError):
        return None
    while pending:
        place, value = pending.pop()
        if isinstance(value, str) and SURROGATE.search(value):
            return _dotted(place)
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, entry in entries:
            if isinstance(key, str) and SURROGATE.search(key):
                return _dotted((place, key))
            pending.append(((place, key), entry))
    return None


def _dotted(place: _Place) -> str:
    names: list[str] = []
    while place is not None:
        place, key = place
        names.append(str(key)[:64].encode(errors="replace").decode())
    return ".".join(reversed(names))[:256]


def parse_json_object(body: bytes) -> dict[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise InvalidRequest("body: must be a JSON object")
    return value


def validate(model: type[M], value: dict[str, Any]) -> M:
    """The object as `model`. Raises a RequestError that names the field at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def check_media_type(request: Request) -> None:
    """Only JSON; else any web page could make a browser post to a local server without being asked.

    No type at all is JSON, unless a page of another origin sends it: browsers ask nobody before such a request either.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("content-encoding: only identity is read")
    given = request.headers.get("content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or (given is None and not _cross_origin(request)):
        return
    raise UnsupportedMediaType("content-type: must be application/json")


def _cross_origin(request: Request) -> bool:
    """Whether a browser says so. Programs send neither header."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    elsewhere = origin is not None and origin.partition("://")[2] != request.headers.get("host")
    return elsewhere or site != "same-origin"


async def read_object(request: Request, service: Service, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body's JSON object; it runs in a thread where the body is large.

    In the order of what it costs: the headers, whether the engine serves, whether the queue is full, the bytes.
    """
    check_media_type(request)
    service.require()
    service.admission.check()
    STRICT.set(service.settings.strict_fields)
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        return parse(parse_json_object(body))
    return await asyncio.to_thread(lambda: parse(parse_json_object(body)))
