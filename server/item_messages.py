"""Requests of /v1/responses in the words of chat: items as messages, flat tools and formats as chat's.

reasoning, message, function_call, function_call ──▶ one assistant message
function_call_output                             ──▶ a tool message
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from server.errors import InvalidRequest
from server.protocol.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    CustomOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from server.protocol.responses import FlatTool, InputFields, ResponseRequest, TextFormat
from server.protocol.sampling import SamplingFields
from server.protocol.structured import StructureFields

Message = dict[str, Any]
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.#.function": "tools.#",
    "tools.#.custom": "tools.#",
}
"""Fields of a chat, and what the same is called here: for messages about them."""


def messages(items: Iterable[Item]) -> list[Message]:
    """What a chat template gets. What an assistant wrote in several items of one turn is one message."""
    result: list[Message] = []
    turn: Message | None = None

    def assistant() -> Message:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": None}
            result.append(turn)
        return turn

    for item in items:
        match item:
            case ReasoningItem():
                if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
                    turn = None
                thought = assistant()
                thought["reasoning_content"] = thought.get("reasoning_content", "") + item.text
            case MessageItem(role="assistant"):
                if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
                    turn = None
                assistant()["content"] = item.content
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                _calls(assistant()).append({"id": item.call_id, "type": "function", "function": function})
            case CustomCallItem():
                custom = {"name": item.name, "input": item.input}
                _calls(assistant()).append({"id": item.call_id, "type": "custom", "custom": custom})
            case CallOutputItem() | CustomOutputItem():
                turn = None
                result.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case MessageItem():
                turn = None
                result.append({"role": item.role, "content": item.content})
    for message in result:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # only thought
    return result


def _calls(message: Message) -> list[Any]:
    calls: list[Any] = message.setdefault("tool_calls", [])
    return calls


def chat_fields(body: InputFields, value: Mapping[str, Any], items: Iterable[Item]) -> dict[str, Any]:
    """The request as one of /v1/chat/completions. `value`: as it came; `items`: all that is to be answered."""
    same = SamplingFields.model_fields.keys() | StructureFields.model_fields.keys()
    fields = {name: value[name] for name in same if name in value}
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields["messages"] = [*system, *messages(items)]
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    if body.text.verbosity is not None:
        fields["chat_template_kwargs"] = {"verbosity": body.text.verbosity, **body.chat_template_kwargs}
    fields["reasoning_effort"] = body.reasoning.effort
    if body.text.format is not None:
        if fields.get("response_format") is not None:
            raise InvalidRequest("response_format: not allowed together with text.format", param="response_format")
        fields["response_format"] = _response_format(body.text.format)
    if body.tools:
        fields["tools"] = list(map(_tool, body.tools))
        if "parallel_tool_calls" in body.model_fields_set:
            fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    if isinstance(body, ResponseRequest):
        fields["max_completion_tokens"] = body.limit
        fields["stream"] = body.stream
        if body.logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return fields


def _tool(tool: FlatTool) -> dict[str, Any]:
    if tool.type == "custom":
        format = None if tool.format is None else tool.format.model_dump(exclude_none=True)
        return {"type": "custom", "custom": {"name": tool.name, "description": tool.description, "format": format}}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _tool_choice(choice: Any) -> Any:
    """Chat puts what allowed_tools holds one level deeper; a name may stand at the top in both."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {name: choice.get(name) for name in ("mode", "tools")}}
    return choice


def _response_format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    schema = {"name": format.name, "schema": format.schema_, "description": format.description, "strict": format.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def listed(item: Item, id: str) -> dict[str, Any]:
    """An item as it is stored and shown. `id`: where it has none."""
    values = item.model_dump(exclude_none=True) | {"id": getattr(item, "id", None) or id}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": item.content}
        if item.role == "assistant":
            part["annotations"] = []
        values["content"] = [part]
    values.setdefault("status", "completed")
    return values
