"""Whatever a body holds, it is a request or a refusal that names the field, soon; over HTTP it is never a 500."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config_fields import MAX_DEPTH
from server.body import parse_json_object, validate
from server.conversation import conversation
from server.errors import RequestError
from server.protocol.base import Body
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.messages import MessagesRequest
from server.protocol.responses import ResponseRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.fuzzing import DEEP, JSON, LARGE, altered, fuzz
from tests.server.running import Running

USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}, "required": ["a"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "max_tokens": 2, "stop": ["z"], "logit_bias": {"5": 1.5}}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        USER,
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    **SAMPLING,
}
SHAPED = {
    "messages": [USER],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 2,
}
COMPLETION = {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True, **SAMPLING}
GUIDED = {"prompt": [[1, 2], [3]], "structured_outputs": {"regex": "a+b"}, "max_tokens": 2, "stop_token_ids": [7]}
RESPONSE = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ],
    "instructions": "be brief",
    "tools": [{"type": "function", **TOOL}],
    "text": {"format": {"type": "text"}},
    "max_output_tokens": 16,
}
MESSAGES = {
    "model": "owner/fake",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "stop_sequences": ["z"],
}
EMBEDDING = {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}
Case = tuple[str, type[Body], dict[str, Any]]
CASES: dict[str, Case] = {
    "chat": ("/v1/chat/completions", ChatRequest, CHAT),
    "chat, shaped": ("/v1/chat/completions", ChatRequest, SHAPED),
    "completion": ("/v1/completions", CompletionRequest, COMPLETION),
    "completion, guided": ("/v1/completions", CompletionRequest, GUIDED),
    "response": ("/v1/responses", ResponseRequest, RESPONSE),
    "messages": ("/v1/messages", MessagesRequest, MESSAGES),
    "embedding": ("/v1/embeddings", EmbeddingRequest, EMBEDDING),
    "tokenize": ("/tokenize", TokenizeRequest, {"prompt": "a", "add_special_tokens": True}),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [1, 2]}),
}
REFUSED = {400, 404}
"""404: another model's name."""


def names(model: type[Body]) -> tuple[str, ...]:
    fields = {field.alias or name for name, field in model.model_fields.items()}
    return tuple(sorted(fields | model.unsupported.keys()))


def parsed(body: bytes, read: Callable[[dict[str, Any]], Any]) -> RequestError | None:
    """What is wrong with a body, if anything is; found out soon, and said shortly."""
    began = time.process_time()
    fault: RequestError | None = None
    try:
        read(parse_json_object(body))
    except RequestError as error:
        fault = error
    assert time.process_time() - began < 1
    if fault is not None:
        assert fault.status == 400
        assert len(fault.message) < 1000
        assert fault.message.startswith("body") or (fault.param is not None and len(fault.param) < 1000)
    return fault


def reader(model: type[Body]) -> Callable[[dict[str, Any]], Any]:
    if issubclass(model, ChatRequest):
        return lambda value: conversation(model, value)
    return lambda value: validate(model, value)


@pytest.mark.parametrize("case", sorted(CASES))
def test_good_bodies_are_read(case: str) -> None:
    """Else the fuzzers below would begin with what is refused anyway."""
    _, model, good = CASES[case]
    assert parsed(json.dumps(good).encode(), reader(model)) is None


@pytest.mark.parametrize("case", sorted(CASES))
@fuzz(50)
@given(data=st.data())
def test_a_body_is_a_request_or_a_refusal_that_names_a_field(case: str, data: st.DataObject) -> None:
    _, model, good = CASES[case]
    body = json.dumps(data.draw(altered(good, names(model)))).encode()
    parsed(body, reader(model))


@pytest.mark.parametrize("case", sorted(CASES))
@fuzz(15)
@given(data=st.data())
def test_fields_of_any_values(case: str, data: st.DataObject) -> None:
    _, model, _ = CASES[case]
    value = data.draw(st.dictionaries(st.sampled_from(names(model)), JSON | LARGE | DEEP, max_size=6))
    parsed(json.dumps(value).encode(), reader(model))


@fuzz(100)
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(body: bytes) -> None:
    parsed(body, lambda value: None)


LONG = "[" + "[]," * 2**17 + "[]]"
TEXTS = [*('{"a":' * levels + "1" + "}" * levels for levels in (MAX_DEPTH + 1, 260, 1000, 5000)), f'{{"a":{LONG}}}']


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_deep_and_long_json_in_a_text(text: str) -> None:
    """A schema may come as its JSON text, which the parser of bodies does not look into."""
    for fields in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        fault = parsed(json.dumps({"prompt": "x", **fields}).encode(), reader(CompletionRequest))
        assert fault is not None
        assert fault.param is not None


@pytest.mark.parametrize("case", sorted(CASES))
@fuzz(12)
@given(data=st.data())
def test_over_http_it_is_never_the_servers_fault(case: str, data: st.DataObject, shared: Running) -> None:
    path, model, good = CASES[case]
    body = json.dumps(data.draw(altered(good, names(model)))).encode()
    answer = shared.post(path, body)
    shared.engine.received.clear()  # hypothesis shows what an example is given
    assert answer.status_code == 200 or answer.status_code in REFUSED, answer.text[:500]
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif "event-stream" in answer.headers["content-type"]:
        assert "internal_error" not in answer.text
