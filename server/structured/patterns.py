"""The regexes in a JSON schema, wherever they stand, and its numbers that llguidance would make others of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by name."""
DATA = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords that hold values, which are no schemas whatever they look like."""
REGEXES = ("pattern", "whitespace_pattern")
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Of a number, and which way it must not be too far out."""
_JSON = re.compile(r"%json\s*(?=\{)")


def patterns(schema: Any) -> Iterator[str]:
    """Every regex that a schema holds its texts, names and white space to."""
    for part in _objects(schema):
        named = part.get("patternProperties")
        held = (*map(part.get, REGEXES), *(named if isinstance(named, dict) else ()))
        yield from (regex for regex in held if isinstance(regex, str))


def inexact(schema: Any) -> Iterator[int | float]:
    """Every number that would be another one: llguidance counts in doubles, and in 64 bits.

    A bound that only leaves less to choose from is none of them: many schemas name the largest integer there is.
    """
    for part in _objects(schema):
        for key, sign in BOUNDS.items():
            bound = part.get(key)
            if isinstance(bound, int | float) and bound * sign >= 2**63:
                yield bound
        pending = [part.get("const"), part.get("enum")]
        while pending:
            value = pending.pop()
            if isinstance(value, list):
                pending += value
            elif isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, int) and abs(value) > 2**53 and value % (1 << value.bit_length() - 53):
                yield value


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that is an object, of its values only those that are schemas."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            yield value
            for key, entry in value.items():
                if key in NAMED and isinstance(entry, dict):
                    pending += entry.values()
                elif key not in DATA:
                    pending.append(entry)


def schemas(lark: str) -> Iterator[Any]:
    """Every schema in a Lark grammar, behind its `%json`. What is no JSON is left out: llguidance says so."""
    decoder, at = json.JSONDecoder(), 0
    while (found := _JSON.search(lark, at)) is not None:
        try:
            schema, at = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            at = found.end()
        else:
            yield schema
