"""docs/api.md lists every field of every body, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from server.openapi import OPERATIONS
from server.protocol.base import Body

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
BODIES = {model for operation in OPERATIONS.values() for model in operation.bodies}


def inner(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that stand in a field's type, also where a validator's own input type names them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from inner(argument)
    yield from inner(getattr(annotation, "json_schema_input_type", None)) if annotation is not None else ()


def parts(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in model.model_fields.values():
        for holder in (field.annotation, *field.metadata):
            yield from inner(holder)


def reachable() -> set[type[BaseModel]]:
    """The bodies, what they inherit, and what their fields hold."""
    found: set[type[BaseModel]] = set()
    pending = list(BODIES)
    while pending:
        model = pending.pop()
        if model not in found and model is not BaseModel and model is not Body:
            found.add(model)
            pending += [*(base for base in model.__bases__ if issubclass(base, BaseModel)), *parts(model)]
    return found


def own(model: type[BaseModel]) -> set[str]:
    """Fields that the class itself brings, by the names that clients write."""
    names = model.__annotations__.keys() & model.model_fields.keys()
    return {model.model_fields[name].alias or name for name in names}


def refused(model: type[BaseModel]) -> set[str]:
    """Fields that the class itself refuses, those of its bases aside."""
    assert issubclass(model, Body)
    inherited = {name for base in model.__bases__ for name in getattr(base, "unsupported", {})}
    return set(model.unsupported) - inherited - {field.alias or name for name, field in model.model_fields.items()}


def section(title: str) -> str:
    found = re.findall(rf"^### `{title}`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} sections about {title}"
    return str(found[0])


def rows(text: str) -> dict[str, str]:
    found = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert len(dict(found)) == len(found), "a field is listed twice"
    return dict(found)


MODELS = sorted(reachable(), key=lambda model: model.__name__)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_is_listed(model: type[BaseModel]) -> None:
    listed = rows(section(model.__name__))
    no = {name for name, text in listed.items() if text.startswith("refused")}
    assert listed.keys() - no == own(model)
    assert no == refused(model)
    assert all(len(text) > 3 for text in listed.values())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_bases_are_named(model: type[BaseModel]) -> None:
    bases = {base.__name__ for base in model.__bases__ if issubclass(base, Body) and base is not Body}
    named = re.search(r"^And those of (.+)\.$", section(model.__name__), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named[1]) if named else ()) == bases


def test_no_section_is_about_what_is_gone() -> None:
    assert set(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)) == {model.__name__ for model in MODELS}


def test_every_route_is_listed() -> None:
    listed = {(method.lower(), path) for method, path in re.findall(r"^\| `(\w+) (/[^`]*)` \|", PAGE, re.MULTILINE)}
    assert listed == set(OPERATIONS)


def test_what_a_field_refuses_is_what_the_page_says() -> None:
    """The values that ask for nothing are named."""
    for model in MODELS:
        assert issubclass(model, Body)
        listed = rows(section(model.__name__))
        for name in refused(model):
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in model.unsupported[name])
            assert listed[name].startswith(f"refused, but for {neutral}" if neutral else "refused"), name
