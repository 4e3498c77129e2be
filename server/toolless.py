"""Tools for chat templates that know of none: said in a system message, and earlier calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.parsing.formats import ToolFormat
from server.template import Chat, parsed_object

_EXAMPLE = ("function_name", {"parameter_name": "value"})
_TEXT = """You can call functions. These are described here as JSON:
<tools>
{tools}
</tools>
To call one, write this and nothing else, with its own name and arguments:
{example}
What it returns comes in <tool_response></tool_response>."""


def described(chat: Chat, format: ToolFormat) -> Chat:
    """The same conversation with its tools in the system message, calls as the model would write them, and results in
    the user's turn."""
    messages = [_written(message, format) for message in _answered(chat.messages)]
    if chat.tools:
        tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        text = _TEXT.format(tools=tools, example=format.write([_EXAMPLE]))
        if messages and messages[0]["role"] in ("system", "developer"):
            messages[0] = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        else:
            messages.insert(0, {"role": "system", "content": text})
    return replace(chat, messages=messages, tools=None)


def _answered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of tools as messages of the user, those of one turn in one."""
    result: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        if message["role"] != "tool":
            result.append(dict(message))
            joins = False
            continue
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if joins:
            result[-1]["content"] += f"\n{text}"
        else:
            result.append({"role": "user", "content": text})
        joins = True
    return result


def _written(message: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    calls = message.pop("tool_calls", None)
    if calls:
        text = format.write([(call["function"]["name"], _arguments(call["function"])) for call in calls])
        content = message.get("content") or ""
        message["content"] = f"{content}\n{text}" if content else text
    return message


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those that are no object are shown all the same."""
    text = function.get("arguments") or "{}"
    value = parsed_object(text)
    return {"arguments": text} if value is None else value
