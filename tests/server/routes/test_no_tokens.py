"""Requests for no token at all. A completion's prompt is computed, and comes back where it is echoed; so does
Anthropic's protocol fill its cache. Elsewhere an answer has at least one token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running import CHAT, COMPLETIONS, MODEL, Running

HI = [{"role": "user", "content": "hi"}]
MESSAGE = {"model": MODEL, "messages": HI, "max_tokens": 0}
WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"logprobs": 1},
        {"stop": "O", "ignore_eos": True, "return_token_ids": True},
        {"guided_regex": "a+"},
        {"echo": True},
        {"echo": True, "logprobs": 1, "n": 2},
        {"echo": True, "prompt": ["Once", "Twice upon"]},
    ],
)
def test_a_completion_of_nothing(server: Running, fields: dict[str, Any]) -> None:
    asked = {"prompt": "Once", **fields, "max_tokens": 0}
    body = server.complete(**asked).json()
    prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]] * fields.get("n", 1)
    assert [choice["text"] for choice in body["choices"]] == (prompts if "echo" in fields else [""] * len(prompts))
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    for choice in body["choices"] if "logprobs" in fields else ():
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    *chunks, done = server.stream(COMPLETIONS, **asked)
    assert done == "[DONE]"
    for whole in body["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == whole["index"]]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_the_best_of_nothing_is_nothing(server: Running) -> None:
    choices = server.complete(max_tokens=0, n=2, best_of=3).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all((choice["text"], choice["logprobs"]) == ("", None) for choice in choices)


def test_a_prompt_may_fill_the_context_where_nothing_follows(server: Running) -> None:
    assert server.complete(prompt=[5] * 1024, max_tokens=0).status_code == 200
    assert server.complete(prompt=[5] * 1025, max_tokens=0).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": {"type": "any"}}])
def test_a_message_of_nothing_fills_the_cache(server: Running, more: dict[str, Any]) -> None:
    reply = server.post("/v1/messages", {**MESSAGE, **more})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert (body["content"], body["stop_reason"], body["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert server.engine.submits()[-1].params.max_tokens == 0
    text = server.post("/v1/messages", {**MESSAGE, **more, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    assert events[1]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stream": True}])
@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (CHAT, {"messages": HI}, "max_tokens"),
        (CHAT, {"messages": HI}, "max_completion_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_tokens"),
    ],
)
def test_a_conversation_has_an_answer(
    server: Running, path: str, given: dict[str, Any], param: str, more: dict[str, Any]
) -> None:
    more = {} if path != CHAT and "echo" in more else more
    reply = server.post(path, {**given, **more, param: 0})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert server.engine.submits() == []
