"""Earlier messages as chat templates expect them: calls of functions by id, whatever way the client wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from server.tools import INPUT

Message = dict[str, Any]


def normalized(messages: Iterable[Message]) -> list[Message]:
    """Custom calls become functions with one parameter, the deprecated `function_call` and role `function` become calls
    and results with an id, `reasoning` is `reasoning_content`, and a refusal the content where there is none."""
    result = []
    last = ""
    for number, message in enumerate(messages):
        if (call := message.pop("function_call", None)) is not None:
            last = f"call_{number}"
            message["tool_calls"] = [{"id": last, "type": "function", "function": call}]
        elif message.get("tool_calls"):
            message["tool_calls"] = list(map(_function, message["tool_calls"]))
        else:
            message.pop("tool_calls", None)
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": last}
        if (refusal := message.pop("refusal", None)) is not None:
            message.setdefault("content", refusal)
        if (thought := message.pop("reasoning", None)) is not None:
            message.setdefault("reasoning_content", thought)
        result.append(message)
    return result


def _function(call: Message) -> Message:
    custom = call.get("custom")
    if custom is None:
        return call
    arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": custom["name"], "arguments": arguments}}
