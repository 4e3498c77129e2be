"""What all request bodies share: strict types, null means absent, and no silence about what is not honoured.

body ── nulls dropped ── unsupported fields refused ── unknown fields logged once ── strict validation
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from server.errors import InvalidRequest, RequestError, Unsupported

log = logging.getLogger("octavo.protocol")

MAX_UNKNOWN_NAMES = 256
MAX_PATH_PART = 64
_unknown_names: set[str] = set()
"""Field names already logged; bounded, since clients choose them."""


STRICT: ContextVar[bool] = ContextVar("strict", default=False)
"""Whether unknown fields of the request at hand are refused (--strict-fields)."""


def _whole(value: object) -> object:
    """1.0 may pass for 1; a bool or a string may not (strict mode sees to that).

    Nor may a float that others round to: an integer of more than 64 bits comes from the parser as one.
    """
    if isinstance(value, float) and abs(value) >= 2**53:
        raise ValueError("must be an integer of at most 64 bits, or of 53 where it is written as a float")
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
"""An integer in JSON, or a float that is one. Never a bool, never a string."""
Count = Annotated[Int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[Int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[Int, Field(ge=0, le=2**31 - 1)]


def at_most(limit: int) -> BeforeValidator:
    """Looks at a list's length before its entries; pydantic counts those that it has validated."""

    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"at most {limit} entries are allowed, not {len(value)}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A JSON object. An explicit null is the same as an absent field."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are known elsewhere and not honoured here, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        for name in present.keys() - {field.alias or name for name, field in cls.model_fields.items()}:
            if name not in cls.unsupported:
                _unknown(name)
            elif present[name] not in cls.unsupported[name]:
                accepted = _accepted(cls.unsupported[name])
                raise refused(name, f"this server does not support it{accepted}")
        return present


def _accepted(neutral: tuple[Any, ...]) -> str:
    return f" (accepted: {', '.join(map(repr, neutral))})" if neutral else ""


def _unknown(name: str) -> None:
    if STRICT.get():
        shown = ascii(name[:64])[1:-1]
        raise refused(shown, "no such field is known", "unknown_parameter")
    if name not in _unknown_names and len(_unknown_names) < MAX_UNKNOWN_NAMES:
        _unknown_names.add(name)
        log.info("ignored an unknown request field: %s", ascii(name[:64]))


def count_values(value: Any, limit: int) -> int:
    """Values in a JSON-like value, itself included; counted no further than just past `limit`."""
    count, pending = 1, [value]
    while pending and count <= limit:
        entry = pending.pop()
        children = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, list) else ()
        count += len(children)
        if count <= limit:
            pending += children
    return count


def variant(field: str, value: str, *needed: str, without: str | None = None) -> dict[str, Any]:
    """In a JSON schema: an object whose `field` is this value has the `needed` fields, and not the other one."""
    absent = {} if without is None else {without: {"type": "null"}}
    return {"properties": {field: {"const": value}, **absent}, "required": list(needed)}


def fault(field: str, message: str) -> PydanticCustomError:
    """What a validator of a whole object raises to name one of its fields. `message` holds no braces."""
    return PydanticCustomError("fault", message, {"field": field})


def refused(field: str, message: str, code: str = "unsupported_parameter") -> PydanticCustomError:
    """The same where one of the fields, or entries, is known elsewhere and not honoured here."""
    return PydanticCustomError("refused", "{message}", {"field": field, "message": message, "code": code})


def invalid(error: ValidationError, *before: str | int) -> RequestError:
    """The first fault of a body, named by its dotted path. Input is never echoed: it may be large, or private.

    `before`: the path to what was validated, where it is not the body itself.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    kind, about = first["type"], first.get("ctx", {})
    place = [*before, *first["loc"], *([about["field"]] if kind in ("fault", "refused") else [])]
    path = ".".join(str(part)[:MAX_PATH_PART] for part in place if part != "[key]")
    # Pydantic's words for these are about Python.
    message = "must be an object" if kind in ("model_type", "dict_type") else first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if kind == "refused":
        return Unsupported(f"{path}: {message}{more}", param=path, code=about["code"])
    return InvalidRequest(f"{path or 'body'}: {message}{more}", param=path or None)
