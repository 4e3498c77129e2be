"""Half a surrogate pair is no character: wherever it stands in a body, the answer is a 400 that names the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import CHAT, COMPLETIONS, MODEL, Running

HALVES = ("\ud83d", "\ude00")
SCHEMA = {"type": "object", "title": "t", "properties": {"a": {"enum": ["x"], "pattern": "x"}}}
USE = {"type": "tool_use", "id": "i", "name": "n", "input": {"a": "x"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
SAMPLING = {
    "model": MODEL,
    "stop": ["s", "t"],
    "bad_words": ["b"],
    "user": "u",
    "cache_salt": "c",
    "metadata": {"key": "v"},
    "safety_identifier": "i",
    "prompt_cache_key": "k",
    "request_id": "r",
    "unheard_of": ["x"],
}
TALK: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "chat_template_kwargs": {"k": ["v"]},
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "t",
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["a", "b"], **SAMPLING, "structured_outputs": {"choice": ["y"]}}),
    (COMPLETIONS, {"prompt": "a", "guided_json": "{}", "guided_whitespace_pattern": " ", "grammar": "g"}),
    (
        CHAT,
        {
            **TALK,
            **SAMPLING,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA},
            },
            "prediction": {"type": "content", "content": "p"},
        },
    ),
    ("/v1/chat/completions/input_tokens", TALK),
    ("/apply-template", TALK),
    ("/tokenize", TALK),
    ("/tokenize", {"prompt": "p", "model": MODEL}),
    ("/tokenize", {"content": "p"}),
    ("/tokenize", {"inputs": "p"}),
    ("/detokenize", {"tokens": [5], "model": MODEL}),
    ("/v1/embeddings", {"input": ["a", "b"], "model": MODEL, "user": "u"}),
    *(
        (
            path,
            {
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "o"},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
                ],
                "instructions": "i",
                "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
                "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
                **SAMPLING,
            },
        )
        for path in ("/v1/responses", "/v1/responses/input_tokens")
    ),
    *(
        (
            path,
            {
                "model": MODEL,
                "max_tokens": 2,
                "system": [{"type": "text", "text": "s"}],
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {"a": "x"}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]},
                ],
                "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
                "stop_sequences": ["z"],
                "metadata": {"user_id": "u"},
            },
        )
        for path in ("/v1/messages", "/v1/messages/count_tokens")
    ),
]


def texts(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """The place of every string in a body."""
    if isinstance(value, str):
        yield place
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from texts(entry, *place, key)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_text_of_every_route(server: Running, path: str, body: dict[str, Any]) -> None:
    for number, place in enumerate(texts(body)):
        wrong = json.loads(json.dumps(body))
        holder: Any = wrong
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] += HALVES[number % 2]
        reply = server.post(path, wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, ".".join(map(str, place)))
    reply = server.post(path, {**body, "metadata": {"k" + HALVES[0]: "v"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "metadata.k?")
    assert server.engine.received == []


HALF = r'{"a": "x \ud83d"}'
"""JSON whose text spells half a pair out: no parser of bodies sees it."""
SPELLED = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": HALF}}]}
TAG = "structured_outputs.structural_tag"
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": HALF}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [*TALK["messages"][:2], SPELLED]}, "messages"),
        ("/v1/responses", {"input": [ITEM]}, "input"),
        (COMPLETIONS, {"prompt": "x", "guided_json": HALF}, "guided_json"),
        (
            COMPLETIONS,
            {"prompt": "x", "structured_outputs": {"structural_tag": HALF}},
            "structured_outputs.structural_tag",
        ),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": r"\ud83d"}}, "structured_outputs.regex"),
        (COMPLETIONS, {"prompt": "x", "grammar": r'root ::= "\ud83d"'}, "grammar"),
        (COMPLETIONS, {"prompt": "x", "grammar": r"root ::= [\ud83d]"}, "grammar"),
        (COMPLETIONS, {"prompt": "x", "ebnf": r'start: "\ud83d"'}, "ebnf"),
    ],
)
def test_halves_that_are_spelled_out(
    server: Running, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    reply = server.post(path, {**body, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_two_halves_are_a_character(server: Running) -> None:
    sent = json.dumps({"prompt": "a \U0001f600", "max_tokens": 0, "echo": True}).encode()
    assert rb"\ud83d\ude00" in sent
    assert server.post(COMPLETIONS, sent).json()["choices"][0]["text"] == "a \U0001f600"


@pytest.mark.parametrize("place", ["/v1/models/%ED%A0%BD", "/v1/responses/%ED%A0%BD", "/v1/responses/%FF/input_items"])
def test_halves_in_a_path(server: Running, place: str) -> None:
    reply = server.client.get(place)
    assert reply.status_code == 404
    assert reply.json()["error"]["message"]
