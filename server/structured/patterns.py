"""The regexes in a JSON schema, wherever they stand."""

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
_JSON = re.compile(r"%json\s*(?=\{)")


def patterns(schema: Any) -> Iterator[str]:
    """Every regex that a schema holds its texts, names and white space to."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            named = value.get("patternProperties")
            held = (*map(value.get, REGEXES), *(named if isinstance(named, dict) else ()))
            yield from (regex for regex in held if isinstance(regex, str))
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
