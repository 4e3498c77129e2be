"""Fields of a chat about tools: `tools`, `tool_choice`, `parallel_tool_calls`, and the deprecated `functions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema, model_validator

from server.errors import InvalidRequest
from server.protocol.base import Body, at_most, count_values, fault, variant
from server.tools import Tool, ToolUse

MAX_TOOLS = 128
MAX_DEFINITION = 65_536
"""Characters of a custom tool's grammar."""
MAX_SCHEMA_VALUES = 10_000
"""Values in one function's parameters, at any depth."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
KINDS = [variant("type", kind, "type", kind) for kind in ("function", "custom")]
"""In a JSON schema: an object of a type has the field of the same name."""


class FunctionDefinition(Body):
    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @model_validator(mode="after")
    def _object(self) -> Self:
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise fault("parameters", "must be the schema of an object")
        for name, kind in (("properties", dict), ("required", list)):
            if not isinstance((self.parameters or {}).get(name) or kind(), kind):
                raise fault("parameters", f"{name} must be an {'object' if kind is dict else 'array'}")
        if count_values(self.parameters, MAX_SCHEMA_VALUES) > MAX_SCHEMA_VALUES:
            raise fault("parameters", f"holds more than {MAX_SCHEMA_VALUES} values")
        return self

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters, self.strict)


class Grammar(Body):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, StringConstraints(min_length=1, max_length=MAX_DEFINITION)]


class CustomFormat(Body):
    """Of a custom tool's input."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [variant("type", "text", without="grammar"), variant("type", "grammar", "grammar")]}
    )

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.grammar is None) == (self.type == "grammar"):
            raise fault("grammar", "goes with type grammar, and only with it")
        return self


class CustomDefinition(Body):
    name: Name
    description: str = ""
    format: CustomFormat | None = None

    def tool(self) -> Tool:
        grammar = self.format.grammar if self.format is not None else None
        if grammar is None:
            return Tool(self.name, self.description, custom=True)
        syntax = grammar.syntax
        strict = syntax == "regex"
        return Tool(self.name, self.description, None, strict, True, syntax, grammar.definition)


class ToolDefinition(Body):
    model_config = ConfigDict(json_schema_extra={"anyOf": [*KINDS]})

    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.function is None) != (self.type == "custom") or (self.custom is None) != (self.type == "function"):
            raise fault(self.type, f"a tool of type {self.type} has this field, and no other kind's")
        return self

    def tool(self) -> Tool:
        definition = self.function or self.custom
        assert definition is not None
        return definition.tool()


@dataclass(frozen=True, slots=True)
class Choice:
    """A `tool_choice`."""

    mode: Literal["none", "auto", "required"]
    names: tuple[tuple[str, str], ...] | None = None
    """(kind, name) of what may be called; None: everything."""


def _choice(value: object) -> Choice:
    """Raises ValueError."""
    if isinstance(value, Choice):
        return value
    if value in ("none", "auto", "required"):
        return Choice(value)
    if not isinstance(value, dict):
        raise ValueError("must be none, auto, required, or an object")
    kind = value.get("type")
    if kind in ("function", "custom"):
        return Choice("required", (_named(value),))
    if kind != "allowed_tools":
        raise ValueError("type must be function, custom or allowed_tools")
    allowed = value.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise ValueError("allowed_tools must be an object with mode auto or required")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"allowed_tools.tools must be a list of 1 to {MAX_TOOLS} tools")
    return Choice(allowed["mode"], tuple(map(_named, tools)))


def _named(value: object) -> tuple[str, str]:
    """Of {"type": "function", "function": {"name": …}}, or with the name at its top."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("function", "custom"):
        raise ValueError("a tool must be an object of type function or custom")
    holder = value.get(kind, value)
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind}.name must be a string")
    return kind, name


def _function_choice(value: object) -> Choice:
    if isinstance(value, dict):
        return Choice("required", (_named({"type": "function", "name": value.get("name")}),))
    if value == "required":
        raise ValueError("must be none, auto, or an object with a name")
    return _choice(value)


_HOLDER = {"type": "object", "properties": {"name": {"type": "string", "minLength": 1}}, "required": ["name"]}
_NAMED = {
    "type": "object",
    "properties": {"type": {"enum": ["function", "custom"]}, "function": _HOLDER, "custom": _HOLDER},
    "required": ["type"],
    "anyOf": [_HOLDER, *KINDS],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": _NAMED},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
ToolChoice = Annotated[
    Choice,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}),
]
FunctionChoice = Annotated[
    Choice,
    PlainValidator(_function_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto"]},
                _HOLDER,
            ]
        }
    ),
]


class ToolFields(Body):
    """What a chat says of tools."""

    tools: Annotated[list[ToolDefinition], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: (
        Annotated[bool, Field(description="several calls in one answer; by default, where they are not forced")] | None
    ) = None
    functions: (
        Annotated[
            list[FunctionDefinition],
            Field(min_length=1, max_length=MAX_TOOLS, description="deprecated: tools"),
            at_most(MAX_TOOLS),
        ]
        | None
    ) = None
    function_call: Annotated[FunctionChoice | None, Field(description="deprecated: tool_choice")] = None

    @model_validator(mode="after")
    def _tools(self) -> Self:
        if self.legacy and (self.tools is not None or self.tool_choice is not None):
            raise InvalidRequest("functions: not allowed together with tools or tool_choice", param="functions")
        field, choice = self._choice_field
        kinds = {(("custom" if tool.custom else "function"), tool.name) for tool in self._all}
        if len({name for _, name in kinds}) < len(self._all):
            field = "functions" if self.legacy else "tools"
            raise InvalidRequest(f"{field}: two of them have the same name", param=field)
        if choice is None:
            return self
        if not kinds and (choice.mode == "required" or choice.names):
            raise InvalidRequest(f"{field}: only allowed with {'functions' if self.legacy else 'tools'}", param=field)
        for kind, name in choice.names or ():
            if (kind, name) not in kinds:
                raise InvalidRequest(f"{field}: there is no {kind} {name[:64]!a} among the tools", param=field)
        return self

    @property
    def legacy(self) -> bool:
        """The request uses the deprecated fields, and so does its answer."""
        return self.functions is not None or self.function_call is not None

    @property
    def use(self) -> ToolUse:
        """What all this comes to."""
        tools = tuple(self._all)
        _, choice = self._choice_field
        mode = "none" if not tools else "auto" if choice is None else choice.mode
        names = choice.names if choice is not None else None
        allowed = frozenset(tool.name for tool in tools) if names is None else frozenset(name for _, name in names)
        # A small model that is forced to call, and may call again, never ends.
        parallel = mode != "required" if self.parallel_tool_calls is None else self.parallel_tool_calls
        return ToolUse(tools, mode, allowed, parallel and not self.legacy)

    @property
    def _choice_field(self) -> tuple[str, Choice | None]:
        return ("function_call", self.function_call) if self.legacy else ("tool_choice", self.tool_choice)

    @property
    def _all(self) -> list[Tool]:
        definitions: Iterable[ToolDefinition | FunctionDefinition] = self.tools or self.functions or ()
        return [definition.tool() for definition in definitions]
