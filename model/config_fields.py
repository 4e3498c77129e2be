"""Bounded access to a model's configuration file: whatever comes out has the type and size that was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from model.errors import ModelError

T = TypeVar("T")
MAX_JSON = 1 << 22
"""Bytes of a config.json; real ones have a few thousand."""
MAX_DEPTH = 64
"""Nested arrays and objects: far below what overflows a recursive reader of what was read."""


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError for anything else."""
    value = _read(path, limit)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def read_list(path: Path, limit: int = MAX_JSON) -> list[Any]:
    """The list in a JSON file. Raises ModelError for anything else."""
    value = _read(path, limit)
    if not isinstance(value, list):
        raise ModelError(f"{path} holds no JSON list")
    return value


def _read(path: Path, limit: int) -> object:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
            raise ModelError(f"{path} cannot be read: it is no file")
        with path.open("rb") as file:
            data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise ModelError(f"{path} is bigger than {limit} bytes")
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if depth(value) > MAX_DEPTH:
        raise ModelError(f"{path} is nested more than {MAX_DEPTH} levels deep")
    return value


def depth(value: object) -> int:
    """Levels of arrays and objects in a JSON value, counted no further than just past MAX_DEPTH."""
    levels = -1
    level: list[Any] = [[value]]
    while level and levels <= MAX_DEPTH:
        levels += 1
        inner = (child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry))
        level = [child for child in inner if isinstance(child, dict | list)]
    return levels


class Fields:
    """A mapping whose values are checked as they are read. Null counts as absent; absent without a default is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def bad(self, key: str, wanted: str) -> ModelError:
        value = " ".join(repr(self.values.get(key)).split())  # numpy breaks the lines of a long array
        return ModelError(f"{self.where}: {key} is {value[:80]}; it must be {wanted}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _default(self, key: str, default: T | None) -> T:
        if default is None:
            raise ModelError(f"{self.where}: {key} is missing")
        return default

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN fails the comparison
            raise self.bad(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return self.number(key, low, high) if self.has(key) else None

    def numbers(self, key: str, low: float, high: float, length: int) -> list[float]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.bad(key, f"a list of {length} numbers")
        if not all(type(item) in (int, float) and low <= item <= high for item in value):
            raise self.bad(key, f"a list of numbers from {low:g} to {high:g}")
        return [float(item) for item in value]

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def child(self, key: str) -> Fields:
        """The object under `key`; an empty one where there is none."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def first(self, *keys: str) -> str:
        """The first of these keys that is there; else the first of them, so that an error names it."""
        return next((key for key in keys if self.has(key)), keys[0])

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of them. Ids outside the vocabulary can never be drawn, so they are left out."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(item for item in items if type(item) is int and 0 <= item < vocab_size))
