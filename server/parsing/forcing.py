"""What the engine holds an answer to: calls that are forced or strict, and the form of the text, behind any reasoning.

tool_choice required, named     calls by their schemas, and nothing else
auto, a strict tool             text and calls, these by their schemas
auto, response_format           calls, or text of that form
none or no tools                text of that form
structured_outputs              the answer as the model writes it, calls and all
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from server.errors import InvalidRequest, Unsupported
from server.parsing.detect import AnswerFormats
from server.parsing.grammar import reasoned, tool_grammar
from server.parsing.reasoning import ReasoningFormat
from server.structured.structure import Structure, json_rule, quoted
from server.tools import Tool, ToolUse

CONTENT = "response_format"
"""The field that speaks of the content; all others speak of the answer as the model writes it."""
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def forced(
    formats: AnswerFormats,
    use: ToolUse,
    structure: Structure | None = None,
    *,
    inside: bool = False,
    thinks: bool = False,
) -> Structure | None:
    """The one constraint of a request; None where there is none. Raises RequestError.

    `structure`: what the client says of the answer. `inside`: the prompt ends in the middle of reasoning; `thinks`:
    reasoning may come first.
    """
    reasoning = formats.reasoning if inside or thinks else None
    response = structure
    if structure is not None and not structure.param.startswith(CONTENT):
        if use.choice == "required":
            raise InvalidRequest(
                f"{structure.param}: not allowed with a tool_choice that forces a call", param=structure.param
            )
        return _behind(structure, formats, reasoning, inside)
    if (whole := use.whole) is not None:
        if whole.syntax is None:
            return None
        return _behind(Structure(whole.syntax, whole.definition, "tools"), formats, reasoning, inside)
    if use.choice == "required":
        _check(use)
    elif not use.callable or (response is None and not any(tool.strict for tool in use.callable)):
        return None if response is None else _behind(response, formats, reasoning, inside)
    if formats.tools is None:
        raise Unsupported("tool_choice: calls cannot be forced with --tool-call-parser none", param="tool_choice")
    source = tool_grammar(
        formats.tools,
        use,
        special=formats.special,
        reasoning=reasoning,
        inside=inside,
        answer=None if response is None or use.choice == "required" else _rule(response),
    )
    return Structure("lark", source, "tools")


def _check(use: ToolUse) -> None:
    """Inside JSON a Lark grammar cannot be kept to."""
    lark: Tool | None = next((tool for tool in use.callable if tool.syntax == "lark"), None)
    if lark is not None:
        raise Unsupported(
            f"tool_choice: {lark.name} has a lark grammar, so it can only be forced by its name", param="tool_choice"
        )


def _behind(structure: Structure, formats: AnswerFormats, reasoning: ReasoningFormat | None, inside: bool) -> Structure:
    """The same behind reasoning, where there may be any."""
    if reasoning is None:
        return structure
    return replace(structure, kind="lark", source=reasoned(_rule(structure), formats.special, reasoning, inside))


def _rule(structure: Structure) -> str:
    """The right side of a rule in Lark."""
    match structure.kind:
        case "json":
            return f"%json {json_rule(json.loads(structure.source), structure.whitespace)}"
        case "json_object":
            return f"%json {json_rule({'type': 'object'}, structure.whitespace)}"
        case "regex":
            return f"/{_SLASH.sub(lambda match: match[1] or chr(92) + '/', structure.source)}/"
        case "choice":
            return " | ".join(map(quoted, json.loads(structure.source)))
    raise Unsupported(
        f"{structure.param}: a {structure.kind} is supported neither behind reasoning nor beside tools",
        param=structure.param,
    )
