"""Calls of the demo model, forced: it would hardly call by itself."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.daemon import Daemon

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris on Monday?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "day": {"enum": ["Monday", "Tuesday"]},
                "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 2},
            },
            "required": ["city", "day"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
STRICT: Any = {"type": "function", "function": {"name": "now", "strict": True, "parameters": {"type": "object"}}}


def checked(call: Any) -> None:
    assert call.function.name in ("get_weather", "now")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
        return
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["day"] in ("Monday", "Tuesday")
    assert arguments.keys() <= {"city", "day", "hours"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(daemon: Daemon, choice: Any) -> None:
    """The same whole and streamed, and as the schema says, at any temperature."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        for temperature in (0.0, 1.5):
            fields: Any = {
                "model": client.models.list().data[0].id,
                "messages": ASK,
                "tools": [WEATHER, NOW],
                "tool_choice": choice,
                "temperature": temperature,
                "seed": 7,
                "max_completion_tokens": 120,
            }
            whole = client.chat.completions.create(**fields).choices[0]
            with client.chat.completions.stream(**fields) as stream:
                final = stream.get_final_completion().choices[0]
            for answer in (whole, final):
                assert answer.finish_reason == "tool_calls"
                (call,) = answer.message.tool_calls or []
                checked(call)
            assert whole.message.content is None
            one, other = (whole.message.tool_calls or [])[0], (final.message.tool_calls or [])[0]
            assert one.type == other.type == "function"
            assert one.function.arguments == other.function.arguments


class City(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z][a-z]{2,8}$")


def test_a_form_beside_tools(daemon: Daemon) -> None:
    """The answer has the form, unless it calls."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=ASK,
            tools=[STRICT],
            parallel_tool_calls=False,
            response_format=City,
            temperature=0,
            max_completion_tokens=80,
        )
    message = answer.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, City)
