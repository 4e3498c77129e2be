"""The anthropic SDK: messages whole and streamed, tools, tokens counted; all of it strictly as the SDK's types say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.strict import Strict

MODEL = "SmolLM2-135M-Instruct"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
# The SDK has no temperature any more, the protocol has.
SHORT: Any = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Client(Strict, anthropic.Anthropic):
    """Sync."""


class AsyncClient(Strict, anthropic.AsyncAnthropic):
    """Async."""


@pytest.fixture
def sdk() -> Iterator[Client]:
    with Client(max_retries=0) as client:
        yield client
        assert client.checked


def test_messages(sdk: Client) -> None:
    whole = sdk.messages.create(**SHORT, messages=ASK, system="Be brief.")
    (block,) = whole.content
    assert "Paris" in block.text
    with sdk.messages.stream(**SHORT, messages=ASK, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in sdk.messages.create(**SHORT, messages=ASK, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_a_stop_sequence_and_a_prefix(sdk: Client) -> None:
    counting = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "One, two, three,"}]
    whole = sdk.messages.create(**SHORT, messages=counting, stop_sequences=["five"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "five")


def test_tools(sdk: Client) -> None:
    """A forced call, whole and streamed; the conversation goes on with its result."""
    fields: Any = {**SHORT, "max_tokens": 80, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    whole = sdk.messages.create(**fields, messages=ASK)
    (call,) = whole.content
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Paris", "Rome")
    with sdk.messages.stream(**fields, messages=ASK) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert parts
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    later = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert sdk.messages.create(**SHORT, messages=later, tools=[WEATHER]).content


def test_tokens_are_counted(sdk: Client) -> None:
    counted = sdk.messages.count_tokens(model=MODEL, messages=ASK, tools=[WEATHER])
    answered = sdk.messages.create(**SHORT, messages=ASK, tools=[WEATHER])
    usage = answered.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_refusals_are_the_sdks_exceptions(sdk: Client) -> None:
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**{**SHORT, "model": "none"}, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
        sdk.messages.create(**{**SHORT, "extra_body": {"temperature": 3}}, messages=ASK)
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    sdk.messages.count_tokens(model=MODEL, messages=ASK)


async def test_async() -> None:
    async with AsyncClient(max_retries=0) as sdk:
        whole = await sdk.messages.create(**SHORT, messages=ASK)
        async with sdk.messages.stream(**SHORT, messages=ASK) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert text == whole.content[0].text
        assert await sdk.messages.count_tokens(model=MODEL, messages=ASK)
        assert sdk.checked > 5
