"""The items of a conversation in /v1/responses: messages, calls, their results, reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, ValidationError

from server.errors import Unsupported
from server.protocol.base import Body, invalid
from server.protocol.parts import joined

MAX_ITEMS = 4096
MAX_NAME = 256
TEXT_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the field that holds it."""


class TextPart(Body):
    """Other fields, such as annotations, are not read."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[
    str,
    PlainValidator(lambda value: joined(value, TEXT_TYPES), json_schema_input_type=str | list[TextPart | RefusalPart]),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Annotated[Literal["commentary", "final_answer"], Field(description="not read")] | None = None


class CallItem(Body):
    """A function call that the model made earlier."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts
    id: str | None = None
    status: Status | None = None


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Name
    input: str
    id: str | None = None
    status: Status | None = None


class CustomOutputItem(Body):
    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: Parts
    id: str | None = None
    status: Status | None = None


class SummaryPart(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought earlier; its content is read, or where there is none its summary."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryPart] = Field(default_factory=list, max_length=MAX_ITEMS)
    content: list[ReasoningPart] = Field(default_factory=list, max_length=MAX_ITEMS)
    encrypted_content: Annotated[str, Field(description="not read: the content is there in plain")] | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class ReferenceItem(Body):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]


Item = MessageItem | CallItem | CallOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem | ReferenceItem
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


def parse_items(value: object, param: str = "input") -> list[Item]:
    """A text as one user message, or a list of items. Raises ValueError, or a RequestError that names the item."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if not value or len(value) > MAX_ITEMS:
        raise ValueError(f"must hold 1 to {MAX_ITEMS} items")
    return [_item(entry, param, number) for number, entry in enumerate(value)]


def _item(entry: Any, param: str, number: int) -> Item:
    if not isinstance(entry, dict):
        raise ValueError(f"item {number} must be an object")
    kind = entry.get("type") or ("message" if "role" in entry else "item_reference" if "id" in entry else None)
    if not isinstance(kind, str):
        raise ValueError(f"item {number} must have a type")
    if kind not in KINDS:
        where = f"{param}.{number}"
        raise Unsupported(
            f"{where}: items of type {kind[:40]!a} are not supported", param=where, code="unsupported_value"
        )
    try:
        return KINDS[kind].model_validate(entry)
    except ValidationError as error:
        raise invalid(error, param, number) from None
