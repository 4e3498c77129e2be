"""Content that may come in parts: all of it is text here."""

from __future__ import annotations

from collections.abc import Mapping

from server.errors import Unsupported


def joined(value: object, kinds: Mapping[str, str], param: str) -> str:
    """A string, or text parts joined without a separator. Raises ValueError, or Unsupported for images and the like.

    `kinds`: types of parts that are text, and the field that holds it; `param`: what the content belongs to.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts")
    texts: list[str] = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"part {number} must be an object with a type")
        if kind not in kinds:
            raise Unsupported(
                f"{param}: the model takes text only, not a part of type {kind[:32]!a}",
                param=param,
                code="unsupported_value",
            )
        text = part.get(kinds[kind])
        if not isinstance(text, str):
            raise ValueError(f"part {number} must have a string in {kinds[kind]!r}")
        texts.append(text)
    return "".join(texts)
