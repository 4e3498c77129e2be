"""Grammars of calls, in llguidance's Lark: what makes the model call a tool, and call it right.

    required            reasoning? call+
    auto, strict        reasoning? (text call)* text      with the text up to a call's marker free
    auto, with a form   reasoning? (call+ | answer)       of the answer: `response_format`

Pure: text in, text out. What a schema can't be turned into is found out where the grammar is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.parsing.formats import ToolFormat
from server.parsing.reasoning import ReasoningFormat
from server.structured.structure import json_rule, quoted
from server.tools import Tool, ToolUse

_DEFINITIONS = ("$defs", "definitions")
_TEXT = "TEXT: /(?s:.*)/"
_GAP = r"GAP: /\s{0,8}/"


class _Rules:
    """A grammar that is being written."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {}

    def literal(self, text: str) -> str:
        """A marker where it is a special token, else the text; nothing for none."""
        if text in self._special:
            return f"<[{self._special[text]}]>"
        return quoted(text) if text else ""

    def add(self, name: str, *parts: str, lazy: bool = False) -> str:
        self._rules[name + ("[lazy]" if lazy else "")] = " ".join(filter(None, parts)) or '""'
        return name

    def until(self, name: str, marker: str) -> str:
        """Any text up to a marker, and the marker."""
        if marker in self._special:
            return self.add(name, "TEXT", self.literal(marker))
        return self.add(name, "TEXT", quoted(marker), lazy=True)

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {rule}" for name, rule in self._rules.items()), _TEXT, _GAP])


def tool_grammar(
    format: ToolFormat,
    use: ToolUse,
    *,
    special: Mapping[str, int],
    reasoning: ReasoningFormat | None = None,
    inside: bool = False,
    answer: str | None = None,
) -> str:
    """For a request whose calls have to follow their schemas. At least one tool is callable.

    `special`: markers that are special tokens, by their ids. `reasoning`: what may come first; `inside`: what the
    prompt began and the model has to end. `answer`: what an answer without calls has to be, the right side of a rule.
    """
    rules = _Rules(special)
    thought = _thought(rules, reasoning, inside)
    if answer is not None and not (format.before or format.python):
        calls = " | ".join(f"%json {_whole(format, tool)}" for tool in use.callable)
        return rules.text(f"{thought} ({rules.add('calls', calls)} | {rules.add('answer', answer)})".strip())
    calls = _calls(rules, format, use)
    if use.choice == "required":
        return rules.text(f"{thought} {calls}".strip())
    if answer is not None:
        return rules.text(f"{thought} ({calls} | {rules.add('answer', answer)})".strip())
    if format.before:
        head = rules.until("head", format.before)
        body = rules.add("free_calls", head, _body(rules, format, use))
        more = "*" if use.parallel else "?"
        return rules.text(f"{thought} {body}{more} TEXT".strip())
    # Calls that no marker begins are told from text by their first character.
    first = "[" if format.python else "{"
    return rules.text(f"{thought} ({calls} | OTHER?)\nOTHER: /\\s*[^\\s\\{first}](?s:.*)/".strip())


def reasoned(answer: str, special: Mapping[str, int], reasoning: ReasoningFormat, inside: bool) -> str:
    """A grammar of an answer, the right side of a rule, behind reasoning."""
    rules = _Rules(special)
    return rules.text(f"{_thought(rules, reasoning, inside)} {rules.add('answer', answer)}")


def _thought(rules: _Rules, reasoning: ReasoningFormat | None, inside: bool) -> str:
    if reasoning is None:
        return ""
    thought = f"{rules.until('thought', reasoning.close)} GAP"
    return thought if inside else f"({rules.literal(reasoning.open)} {thought})?"


def _calls(rules: _Rules, format: ToolFormat, use: ToolUse) -> str:
    """One call or several, their markers too."""
    return rules.add("calls", rules.literal(format.before), _body(rules, format, use))


def _body(rules: _Rules, format: ToolFormat, use: ToolUse) -> str:
    """What stands behind the first marker."""
    one = rules.add("one", " | ".join(_call(rules, format, tool, number) for number, tool in enumerate(use.callable)))
    behind = rules.literal(format.behind)
    if not format.repeats:
        more = f"({quoted(format.between)} {one})*" if use.parallel else ""
        return (
            f"{quoted(format.around[0])} {one} {more} {quoted(format.around[1])}"
            if format.around[0]
            else f"{one} {more}"
        )
    between = quoted(format.between) if format.between else ""
    more = f"({between} {rules.literal(format.before)} {one} {behind})*" if use.parallel else ""
    return f"{one} {behind} {more}"


def _call(rules: _Rules, format: ToolFormat, tool: Tool, number: int) -> str:
    if format.python:
        arguments = _keywords(rules, tool.schema(), f"args_{number}", tool.strict)
        return rules.add(f"call_{number}", quoted(f"{tool.name}("), arguments, quoted(")"))
    arguments = rules.add(f"args_{number}", f"%json {_schema(tool.schema(), tool.strict)}")
    if format.named:
        return rules.add(f"call_{number}", quoted(tool.name), rules.literal("[ARGS]"), arguments)
    head, tail = ("\n", "\n") if format.behind else ("", "")
    begin = f'{head}{{"name": {json.dumps(tool.name)}, {json.dumps(format.key)}: '
    return rules.add(f"call_{number}", quoted(begin), arguments, quoted("}" + tail))


def _whole(format: ToolFormat, tool: Tool) -> str:
    """A call as one JSON object, beside another one that the answer may be: llguidance never looks back, so both must
    fall into the same lexemes."""
    schema = tool.schema()
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    properties = {"name": {"const": tool.name}, format.key: schema}
    whole = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return _schema({**shared, **whole}, tool.strict)


def _schema(schema: Mapping[str, Any], strict: bool) -> str:
    """What a schema that is not strict says beyond what can be enforced is left out."""
    return json_rule({**schema, **({} if strict else {"x-guidance": {"lenient": True}})})


def _keywords(rules: _Rules, schema: Mapping[str, Any], name: str, strict: bool) -> str:
    """Keyword arguments in the order of the schema, commas between those that are there.

    first_k: arguments from k on, none before them; rest_k: the same with some before.
    """
    properties = schema.get("properties") or {}
    required: Sequence[str] = schema.get("required") or ()
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    first = rest = ""
    for number, (key, value) in reversed(list(enumerate(properties.items()))):
        sub = {**value, **shared} if isinstance(value, dict) else {}
        one = rules.add(f"{name}_{number}", quoted(f"{key}="), f"%json {_schema(sub, strict)}")
        optional = key not in required
        later, before = rest, first
        rest = rules.add(
            f"{name}_rest_{number}", f'", " {one} {later}' + (f" | {later or _NOTHING}" if optional else "")
        )
        first = rules.add(f"{name}_first_{number}", f"{one} {later}" + (f" | {before or _NOTHING}" if optional else ""))
    return first


_NOTHING = '""'
