"""The openai SDK on the demo model, sync and async: each answer and each event is strictly what the SDK's types say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.daemon import MODEL, Daemon, serve
from tests.e2e.strict import Strict

QUESTION = "What is the capital of France?"
ASK: Any = [{"role": "user", "content": QUESTION}]
SHORT: Any = {"model": MODEL, "temperature": 0, "max_tokens": 16}


class City(pydantic.BaseModel):
    """What an answer is parsed into."""

    name: Literal["Paris", "Rome"]
    people: int = pydantic.Field(ge=1, le=9)


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


WEATHER: Any = openai.pydantic_function_tool(GetWeather)
FORCED: Any = {"tools": [WEATHER], "tool_choice": "required"}


class Client(Strict, openai.OpenAI):
    """Sync."""


class AsyncClient(Strict, openai.AsyncOpenAI):
    """Async."""


@pytest.fixture
def sdk(daemon: Daemon) -> Iterator[Client]:
    with Client(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: Client) -> None:
    (model,) = sdk.models.list()
    assert model.id == MODEL
    assert sdk.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.models.retrieve("owner/none")


def test_completions(sdk: Client) -> None:
    fields: Any = {**SHORT, "prompt": ["The capital of France is", "One, two,"], "n": 2}
    echoed = sdk.completions.create(**fields, echo=True)
    assert echoed.choices[0].text.startswith("The capital of France is")
    fields["logprobs"] = 2
    whole = sdk.completions.create(**fields)
    chunks = list(sdk.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4 * 16


def test_chat(sdk: Client) -> None:
    fields: Any = {**SHORT, "messages": ASK, "logprobs": True, "top_logprobs": 2}
    whole = sdk.chat.completions.create(**fields).choices[0]
    assert "Paris" in (whole.message.content or "")
    chunks = list(sdk.chat.completions.create(**fields, stream=True))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole.message.content
    with sdk.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == set(kinds)
    assert final.message.content == whole.message.content
    assert whole.logprobs is not None
    assert final.logprobs is not None
    assert final.logprobs.content == whole.logprobs.content


def test_chat_parsed(sdk: Client) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "response_format": City, "temperature": 0}
    whole = sdk.chat.completions.parse(**fields).choices[0].message
    assert isinstance(whole.parsed, City)
    with sdk.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole.parsed
    assert any(event.type == "content.done" and event.parsed == whole.parsed for event in events)
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**fields, max_completion_tokens=3)


def test_chat_tools(sdk: Client) -> None:
    """A forced call, parsed; the conversation goes on with its result."""
    fields: Any = {"model": MODEL, "temperature": 0, **FORCED}
    message = sdk.chat.completions.parse(messages=ASK, **fields).choices[0].message
    (call,) = message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with sdk.chat.completions.stream(messages=ASK, **fields) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    conversation: Any = [*ASK, message.to_dict(), result]
    later = sdk.chat.completions.create(**SHORT, messages=conversation, tools=[WEATHER])
    assert later.choices[0].message.content


def test_responses(sdk: Client) -> None:
    fields: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    whole = sdk.responses.create(**fields)
    assert "Paris" in whole.output_text
    assert sdk.responses.retrieve(whole.id).output_text == whole.output_text
    assert [item.type for item in sdk.responses.input_items.list(whole.id)] == ["message"]
    events = list(sdk.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with sdk.responses.stream(**fields, previous_response_id=whole.id) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.previous_response_id == whole.id
    counted = sdk.responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert whole.usage is not None
    assert counted.input_tokens == whole.usage.input_tokens
    sdk.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(whole.id)


def test_responses_parsed_and_tools(sdk: Client) -> None:
    fields: Any = {"model": MODEL, "input": QUESTION, "temperature": 0}
    parsed = sdk.responses.parse(**fields, text_format=City).output_parsed
    assert isinstance(parsed, City)
    with sdk.responses.stream(**fields, text_format=City) as stream:
        assert {event.type for event in stream} > {"response.output_text.delta", "response.output_text.done"}
        assert stream.get_final_response().output_parsed == parsed
    tools: Any = {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required"}
    (call,) = sdk.responses.create(**fields, **tools).output
    assert call.type == "function_call"
    assert GetWeather.model_validate_json(call.arguments)
    with sdk.responses.stream(**fields, **tools) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (item,) = stream.get_final_response().output
    assert item.type == "function_call"
    assert "".join(deltas) == item.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    question: Any = {"role": "user", "content": QUESTION}
    later = sdk.responses.create(
        **{**fields, "input": [question, call.to_dict(), result], "max_output_tokens": 16}, tools=tools["tools"]
    )
    assert later.output


def test_embeddings(sdk: Client) -> None:
    """By itself the SDK asks for base64 and decodes it; its type is that of what it hands on."""
    plain = sdk.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    with openai.OpenAI(base_url=sdk.base_url, api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model=MODEL, input=["one", "two"])
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert packed.usage == plain.usage


def test_refusals_are_the_sdks_exceptions(sdk: Client) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(**{**SHORT, "temperature": 3}, messages=ASK)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(**{**SHORT, "model": "none"}, messages=ASK)


def test_async(daemon: Daemon) -> None:
    """The same calls, at once, on one client."""

    async def chat(client: AsyncClient) -> None:
        fields: Any = {**SHORT, "messages": ASK}
        whole = (await client.chat.completions.create(**fields)).choices[0].message.content
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == whole
        chunks = [chunk async for chunk in await client.chat.completions.create(**fields, stream=True)]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole

    async def forms(client: AsyncClient) -> None:
        fields: Any = {"model": MODEL, "messages": ASK, "temperature": 0}
        answer = await client.chat.completions.parse(**fields, response_format=City)
        assert isinstance(answer.choices[0].message.parsed, City)
        called = await client.chat.completions.parse(**fields, **FORCED)
        (call,) = called.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)

    async def responses(client: AsyncClient) -> None:
        fields: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        parsed = await client.responses.parse(**{**fields, "max_output_tokens": 60}, text_format=City)
        assert isinstance(parsed.output_parsed, City)

    async def others(client: AsyncClient) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]
        await client.embeddings.create(model=MODEL, input="one", encoding_format="float")
        stream = await client.completions.create(**SHORT, prompt="One, two,", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> None:
        async with AsyncClient(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(chat(client), forms(client), responses(client), others(client))
            assert client.checked > 20

    asyncio.run(all_at_once())


def test_timeouts(daemon: Daemon, sdk: Client) -> None:
    """The SDK gives up where the answer takes longer than it waits, and what it asked for is let go."""
    fields: Any = {**SHORT, "prompt": "One, two,", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        sdk.completions.create(**fields, timeout=0.5)
    daemon.wait(daemon.at_rest, 2, "blocks freed")

    async def ask() -> None:
        async with AsyncClient(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(**fields, timeout=0.5)

    asyncio.run(ask())
    daemon.wait(daemon.at_rest, 2, "blocks freed")


@dataclass
class Retries:
    """What a client was told when it was refused, and how long it then waited."""

    told: list[tuple[int, float]] = field(default_factory=list)
    """Status and seconds to wait of each answer; the SDK looks at the milliseconds first."""
    waited: list[float] = field(default_factory=list)
    last: float = 0.0

    def client(self, daemon: Daemon) -> Client:
        http = openai.DefaultHttpxClient(event_hooks={"request": [self._ask], "response": [self._hear]})
        return Client(base_url=f"{daemon.url}/v1", api_key="none", max_retries=20, http_client=http)

    def _ask(self, request: object) -> None:
        if self.told:
            self.waited.append(time.monotonic() - self.last)

    def _hear(self, response: Any) -> None:
        self.told.append((response.status_code, int(response.headers.get("retry-after-ms", 0)) / 1000))
        self.last = time.monotonic()

    def check(self, status: int) -> None:
        """Refused with this status and no other, it came back no sooner than it was told to, until it was served."""
        *refused, served = self.told
        assert served == (200, 0)
        assert {refusal[0] for refusal in refused} == {status}
        assert all(
            wait >= seconds - 0.01 and seconds >= 1 for wait, (_, seconds) in zip(self.waited, refused, strict=True)
        )


def test_retries() -> None:
    """While the model is loaded, and while the only slot is taken."""
    with serve("--max-num-seqs", "1", "--max-queued-requests", "0", loaded=False) as daemon:
        loading, full = Retries(), Retries()
        with loading.client(daemon) as client:
            client.completions.create(**SHORT, prompt="One, two,")
        loading.check(503)
        with (
            Client(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as holder,
            full.client(daemon) as client,
        ):
            long: Any = {**SHORT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
            held = holder.completions.create(**long, prompt="One, two,", stream=True)
            next(held)
            with pytest.raises(openai.RateLimitError) as caught:
                holder.completions.create(**SHORT, prompt="One, two,")
            assert caught.value.code == "server_overloaded"
            leaver = threading.Timer(0.5, held.close)
            leaver.start()
            client.completions.create(**SHORT, prompt="One, two,")
            leaver.join()
        full.check(429)
