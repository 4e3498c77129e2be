"""Requests of /v1/messages in the words of chat: blocks as messages, tools, choice and thinking as chat's.

user       [tool_result, tool_result, text]      ──▶ tool, tool, user
assistant  [thinking, text, tool_use, tool_use]  ──▶ one assistant message
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from server.protocol.base import Count
from server.protocol.chat import ChatRequest
from server.protocol.messages import (
    CountRequest,
    GivenMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tools.#.function.parameters": "tools.#.input_schema",
    "tools.#.function": "tools.#",
}
"""Fields of a chat, and what the same is called here: for messages about them."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageChat(ChatRequest):
    """A request in the words of chat, where it may also ask for no token at all: its prompt is then in the cache."""

    max_completion_tokens: Count | None = None


def messages(given: Iterable[GivenMessage]) -> list[dict[str, Any]]:
    """What a chat template gets."""
    result: list[dict[str, Any]] = []
    for message in given:
        if message.role == "assistant":
            result.append(_assistant(message))
            continue
        texts = []
        for block in message.blocks:
            if isinstance(block, ToolResultBlock):
                result.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content})
            elif isinstance(block, TextBlock):
                texts.append(block.text)
        if texts or not message.blocks:
            result.append({"role": message.role, "content": "".join(texts)})
    return result


def _assistant(message: GivenMessage) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
    written: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        written["reasoning_content"] = "".join(thoughts)
    if calls:
        written["tool_calls"] = calls
    return written


def chat_fields(body: CountRequest) -> dict[str, Any]:
    """The request as one of /v1/chat/completions. A last message of the assistant is one to go on with."""
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    fields: dict[str, Any] = {"messages": [*system, *messages(body.messages)]}
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    config = body.output_config
    if config is not None and config.effort is not None:
        kwargs["reasoning_effort"] = config.effort
    fields["chat_template_kwargs"] = {**kwargs, **body.chat_template_kwargs}
    format = (config.format if config is not None else None) or body.output_format
    if format is not None:
        schema = {"name": "output", "schema": format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            **{name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "seed", "priority")},
        }
    return fields
