"""JSON schemas as clients send them. All but the open ones describe texts of bounded length, so that any model comes to
an end; the open ones leave keys or values free."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """A closed object; without `required` all its properties are."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


def string(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def integer(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def array(items: Any, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


def recursive(name: str, definition: Schema) -> Schema:
    return {"$defs": {name: definition}, "$ref": f"#/$defs/{name}"}


WORD = string(8, pattern="^[a-z]+$")
POINT = obj({"x": integer(-9, 9), "y": integer(-9, 9)})
ADDRESS = obj({"street": string(), "city": string(), "zip": string(5, pattern="^[0-9]{5}$")})

CLOSED: dict[str, Schema] = {
    # scalars
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "string": string(),
    "string of at least": string(20, minLength=8),
    "string of exactly": string(4, minLength=4),
    "string of unicode length": string(3, minLength=3, pattern="^[äöü家😀]{3}$"),
    "integer": integer(0, 100),
    "integer, negative": integer(-1000, -10),
    "integer, exclusive": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 9},
    "integer, one value": integer(7, 7),
    "integer, large": integer(10**9, 10**12),
    "integer, multiple": integer(10, 90, multipleOf=10),
    "number, multiple": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
    "number as integer": {"type": "number", "minimum": -3, "maximum": 3, "multipleOf": 1},
    # values
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of types": {"enum": [1, "one", None, True, 1.5]},
    "enum, unicode": {"enum": ["日本語", "naïve", "Straße", "😀👨‍👩‍👧"]},
    "enum, escapes": {"enum": ['quote " inside', "back\\slash", "line\nbreak", "tab\t", "\u0001"]},
    "enum, prefixes": {"enum": ["a", "ab", "abc", ""]},
    "enum, typed": {"type": "string", "enum": ["low", "high"]},
    "const": {"const": "only this"},
    "const object": {"const": {"a": [1, {"b": None}], "ü": "é"}},
    "const number": {"const": 3.25},
    "many": {"enum": [f"value number {i}" for i in range(500)]},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern, alternatives": {"type": "string", "pattern": "^(cat|dog|bird){1,3}$"},
    "pattern, escaped": {"type": "string", "pattern": "^\\([0-9]{3}\\) [0-9]{3}-[0-9]{4}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "pattern": "^20[0-9]{2}-0[1-9]-0[1-9]T0[0-9]:[0-5][0-9]:[0-5][0-9]Z$"},
    "time": {"type": "string", "pattern": "^[01][0-9]:[0-5][0-9]$"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    # arrays
    "array": array(integer(0, 9), minItems=1),
    "array, empty": array(integer(0, 9), 0),
    "array of exactly": array({"type": "boolean"}, 4, minItems=4),
    "array of strings": array(WORD),
    "array of arrays": array(array(integer(0, 9), 2), 2),
    "array of objects": array(POINT, 2, minItems=2),
    "tuple": {
        "type": "array",
        "prefixItems": [integer(0, 9), WORD, {"type": "null"}],
        "items": False,
        "minItems": 3,
    },
    "array of enums": array({"enum": ["N", "E", "S", "W"]}, 5, minItems=2),
    # objects
    "object": obj({"name": WORD, "age": integer(0, 120)}),
    "object, empty": obj({}),
    "object, optional": obj({"a": integer(0, 9), "b": integer(0, 9), "c": integer(0, 9)}, ["b"]),
    "object, all optional": obj({"a": {"type": "boolean"}, "b": {"type": "boolean"}}, []),
    "object, nested": obj({"a": obj({"b": obj({"c": obj({"d": integer(0, 9)})})})}),
    "object, unicode keys": obj({"größe": integer(0, 9), "名前": WORD, 'a "b"\n': {"type": "null"}}),
    "object, described": obj({"a": {**integer(0, 9), "title": "A", "description": "An a.", "default": 3}}, title="T"),
    "object, types": obj({"a": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}}),
    "object, wide": obj({f"field_{i}": {"type": "boolean"} for i in range(12)}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^[a-c]$": integer(0, 9)},
        "additionalProperties": False,
        "maxProperties": 2,
        "minProperties": 1,
    },
    "person": obj({"name": WORD, "address": ADDRESS, "tags": array(WORD), "active": {"type": "boolean"}}),
    "order": obj({"id": integer(1, 999), "lines": array(obj({"sku": WORD, "count": integer(1, 9)}), 2, minItems=1)}),
    # choices
    "anyOf": {"anyOf": [integer(0, 9), WORD, {"type": "null"}]},
    "anyOf objects": {"anyOf": [obj({"kind": {"const": "a"}, "x": integer(0, 9)}), obj({"kind": {"const": "b"}})]},
    "oneOf, disjoint": {"oneOf": [obj({"kind": {"const": "a"}}), obj({"kind": {"const": "b"}, "y": WORD})]},
    "oneOf types": {"oneOf": [integer(0, 9), {"type": "boolean"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "optional field": obj({"nickname": {"anyOf": [WORD, {"type": "null"}]}, "age": integer(0, 9)}),
    # references
    "$ref": {"$defs": {"p": POINT}, **obj({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    "definitions": {"definitions": {"w": WORD}, **array({"$ref": "#/definitions/w"}, 2, minItems=1)},
}

OPEN: dict[str, Schema] = {
    "tree": recursive("node", obj({"value": integer(0, 9), "next": {"$ref": "#/$defs/node"}}, ["value"])),
    "list": recursive(
        "cell", obj({"head": integer(0, 9), "tail": {"anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}]}})
    ),
    "additionalProperties": {
        "type": "object",
        "properties": {"id": integer(0, 9)},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "map": {"type": "object", "additionalProperties": integer(0, 9), "minProperties": 1, "maxProperties": 2},
    "string without an end": {"type": "string"},
    "array without an end": {"type": "array", "items": integer(0, 9)},
    "any object": {"type": "object"},
}
