"""The tools of a request, by whatever route: what may be called, what has to be, and what the model is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

INPUT = "input"
"""A custom tool is shown to the model as a function with this one parameter, a string."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the client can do for the model."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of a function's arguments; None: it takes none."""
    strict: bool = False
    """Arguments follow the schema, whether the call was forced or not."""
    custom: bool = False
    """It takes a text, not JSON."""
    syntax: Literal["regex", "lark"] | None = None
    """Of the grammar that a custom tool's text follows; None: any text."""
    definition: str = ""
    """That grammar."""

    def schema(self) -> dict[str, Any]:
        """Of the arguments object that the model writes. Only what the schema names, unless it says otherwise."""
        if self.custom:
            text = {"type": "string"} | ({"pattern": f"^(?:{self.definition})$"} if self.syntax == "regex" else {})
            return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        schema = dict(self.parameters or {"type": "object"})
        if schema.get("type") == "object" and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
            schema.setdefault("properties", {})
            schema.setdefault("additionalProperties", False)
        return schema

    def shown(self) -> dict[str, Any]:
        """As chat templates expect a tool."""
        description = self.description
        if self.syntax is not None:
            description = f"{description}\n\nThe input follows this {self.syntax} grammar:\n{self.definition}".lstrip()
        function: dict[str, Any] = {"name": self.name, "description": description}
        function["parameters"] = self.schema() if self.custom else dict(self.parameters or NO_PARAMETERS)
        return {"type": "function", "function": function}


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools there are, and what the model may or has to do with them."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    allowed: frozenset[str] = field(default_factory=frozenset)
    """Names that may be called. A choice that names one tool is `required` with that name alone."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """In the order of the request; none where `choice` is none."""
        return tuple(tool for tool in self.tools if tool.name in self.allowed) if self.choice != "none" else ()

    @property
    def whole(self) -> Tool | None:
        """The custom tool whose input is the whole answer: the one that has to be called."""
        tools = self.callable
        return tools[0] if self.choice == "required" and len(tools) == 1 and tools[0].custom else None

    def shown(self) -> list[dict[str, Any]] | None:
        """What the template gets. With `none` the model is not told of any tool."""
        return [tool.shown() for tool in self.tools] if self.choice != "none" and self.tools else None
