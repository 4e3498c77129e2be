"""Content that may come in parts: all of it is text here."""

from __future__ import annotations

from collections.abc import Mapping

from server.protocol.base import fault, refused


def joined(value: object, kinds: Mapping[str, str]) -> str:
    """A string, or text parts joined without a separator. Raises what names the part at fault: an image, for one.

    `kinds`: types of parts that are text, and the field that holds it.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts")
    texts: list[str] = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise fault(str(number), "must be an object with a type")
        if kind not in kinds:
            message = f"the model takes text only, not a part of type {kind[:32]!a}"
            raise refused(str(number), message, "unsupported_value")
        text = part.get(kinds[kind])
        if not isinstance(text, str):
            raise fault(f"{number}.{kinds[kind]}", "must be a string")
        texts.append(text)
    return "".join(texts)
