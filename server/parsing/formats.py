"""The formats in which models write tool calls: how each is read, and how it is written where a template can't.

hermes       <tool_call>{"name": "f", "arguments": {…}}</tool_call>
granite      <|tool_call|>[{"name": "f", "arguments": {…}}, …]
llama3_json  {"name": "f", "parameters": {…}}; …           with or without <|python_tag|>
mistral      [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
             [TOOL_CALLS]f[CALL_ID]…[ARGS]{…}              of late, once for every call
pythonic     [f(a=1, b="x"), …]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.parsing.calls import Calls
from server.parsing.pythonic import python_value, pythonic
from server.parsing.reader import Fault, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_TO_BRACKET = re.compile(r"[^\[{]*")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    read: Callable[[Calls, ToolFormat], Steps[None]]
    """To the end of the text; see `Calls`."""
    before: str = ""
    """The marker that a call, or a list of them, begins with."""
    behind: str = ""
    around: tuple[str, str] = ("", "")
    """Brackets of a list of calls."""
    between: str = "\n"
    """What parts two calls."""
    key: str = "arguments"
    others: tuple[str, ...] = ()
    """Further markers that are read."""
    repeats: bool = False
    """Markers stand around every call, not around all of them."""
    named: bool = False
    """The name stands before the arguments, outside JSON."""
    python: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What must not be lost where it is a special token."""
        return tuple(filter(None, (self.before, self.behind, *self.others)))

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers that a call begins with."""
        return tuple(filter(None, (self.before, *(other for other in self.others if other not in _INNER))))

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Names and arguments, as the model would."""
        texts = [self._written(name, arguments) for name, arguments in calls]
        if self.repeats:
            return self.between.join(f"{self.before}{text}{self.behind}" for text in texts)
        return f"{self.before}{self.around[0]}{self.between.join(texts)}{self.around[1]}{self.behind}"

    def _written(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.python:
            return f"{name}({', '.join(f'{key}={python_value(value)}' for key, value in arguments.items())})"
        if self.named:
            return f"{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"
        text = json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)
        return f"\n{text}\n" if self.behind else text


_INNER = ("[CALL_ID]", "[ARGS]", "<|python_end|>")


def _marked(calls: Calls, format: ToolFormat) -> Steps[None]:
    """A marker, one object or a list of them, a closing marker."""
    while (yield from calls.text_until(format.begins)):
        try:
            yield from calls.json_calls()
        except Fault:
            calls.failed()
        else:
            if format.behind:
                yield from calls.closer(format.behind)


def _bare(calls: Calls, format: ToolFormat) -> Steps[None]:
    """Objects with nothing around them, where the answer begins or behind the marker."""
    reader = calls.reader
    yield from reader.blank()
    found = (yield from reader.peek()) == "{"
    if not found:
        calls.failed()
    while found or (yield from calls.text_until(format.begins)):
        found = False
        try:
            yield from calls.json_calls()
            while (yield from calls.another(";")):
                yield from calls.json_calls()
        except Fault:
            calls.failed()


def _mistral(calls: Calls, format: ToolFormat) -> Steps[None]:
    reader = calls.reader
    while (yield from calls.text_until(format.begins)):
        try:
            yield from reader.blank()
            if (yield from reader.peek()) in ("[", "{"):
                yield from calls.json_calls()
                continue
            name = calls.known((yield from reader.run(_NAME)))
            yield from reader.blank()
            while (yield from reader.peek()) == "[":
                if (yield from reader.one_of(_INNER)) is None:
                    raise Fault
                yield from reader.run(_TO_BRACKET)
            yield from calls.arguments(name)
        except Fault:
            calls.failed()


HERMES = ToolFormat("hermes", _marked, "<tool_call>", "</tool_call>", repeats=True)
GRANITE = ToolFormat(
    "granite", _marked, "<|tool_call|>", around=("[", "]"), between=", ", others=("<tool_call>", "<function_call>")
)
LLAMA = ToolFormat("llama3_json", _bare, between="; ", key="parameters", others=("<|python_tag|>",))
MISTRAL = ToolFormat(
    "mistral", _mistral, "[TOOL_CALLS]", around=("[", "]"), between=", ", others=("[CALL_ID]", "[ARGS]")
)
MISTRAL_NAMED = ToolFormat(
    "mistral", _mistral, "[TOOL_CALLS]", between="", others=("[CALL_ID]", "[ARGS]"), repeats=True, named=True
)
PYTHONIC = ToolFormat(
    "pythonic",
    lambda calls, format: pythonic(calls, format.begins),
    around=("[", "]"),
    between=", ",
    others=("<|python_start|>", "<|python_end|>"),
    python=True,
)
TOOL_FORMATS = {format.name: format for format in (HERMES, LLAMA, MISTRAL, GRANITE, PYTHONIC)}
