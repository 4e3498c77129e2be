"""Chats of a scripted model: what it says next, its answer read whole and from a stream, held to the SDK's types."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from model.tokenizer import Tokenizer
from tests.server.running import CHAT, Running

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}


def markup(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def say(server: Running, smol: Tokenizer, text: str) -> None:
    """The next answers are this text."""
    ids = smol.encode(text, add_special_tokens=False, allow_special=False)
    server.engine.reply = [*ids, *sorted(smol.eos_ids)[:1]]


def whole(server: Running, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer that is as the SDK's types say."""
    reply = server.chat(**{"messages": ASK, "tools": [NOW, WEATHER], "max_tokens": 200, **fields})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    ChatCompletion.model_validate(body, strict=True)
    choice: dict[str, Any] = body["choices"][0]
    return choice


def streamed(server: Running, **fields: Any) -> dict[str, Any]:
    """The same, put together from a stream."""
    chunks = server.stream(CHAT, **{"messages": ASK, "tools": [NOW, WEATHER], "max_tokens": 200, **fields})
    message: dict[str, Any] = {"content": "", "tool_calls": [], "reasoning_content": "", "reasoning": ""}
    reasons = []
    for chunk in chunks[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content", "reasoning"):
                message[key] += delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                    continue
                assert call["index"] == len(message["tool_calls"]) - 1
                assert "id" not in call
                kind = "custom" if "custom" in call else "function"
                key = "input" if kind == "custom" else "arguments"
                message["tool_calls"][-1][kind][key] += call[kind][key]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    (reason,) = reasons
    return {"message": message, "finish_reason": reason}


def functions(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", ())
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def prompt(server: Running, smol: Tokenizer) -> str:
    return smol.decode(server.engine.submits()[-1].prompt_ids, skip_special=False)
