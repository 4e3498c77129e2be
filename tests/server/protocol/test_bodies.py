from __future__ import annotations

from typing import Any

import pytest

from model.config_fields import MAX_DEPTH
from server.body import parse_json, parse_json_object, validate
from server.errors import RequestError
from server.protocol.base import Body
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.tokens import MAX_TOKENS, DetokenizeRequest, TokenizeRequest

HI = [{"role": "user", "content": "hi"}]


def refusal(model: type[Body], body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validate(model, body)
    return caught.value


COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 100}, "frequency_penalty"),
    ({"presence_penalty": -100}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 1e30}, "max_tokens"),
    ({"min_tokens": 50, "max_tokens": 6}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"logprobs": "5"}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stop": ""}, "stop.0"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["q"] * 65}, "stop"),
    ({"stop": ["q" * 2049]}, "stop.0"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "5"}}, "logit_bias.5"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"bad_words": ["w"] * 129}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [7] * 1_000_000}, "allowed_token_ids"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"bad_words": ["q" * 1025]}, "bad_words.0"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"suffix": "):"}, "suffix"),
    ({"echo": True, "stop": ["a", "b"]}, "echo"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 2**63}, "priority"),
    ({"user": "u" * 1025}, "user"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": [[5], [True]]}, "prompt"),
    ({"prompt": ["hi"] * 50_000}, "prompt"),
    ({"prompt": [7] * (2**20 + 1)}, "prompt"),
    ({"prompt": [[7] * (2**20 + 1)]}, "prompt"),
    ({"prompt": ["hi"] * 100, "n": 11}, "n"),
    ({"truncation_side": "middle"}, "truncation_side"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETION_FAULTS)
def test_faults_of_a_completion_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, {"prompt": "x", **fields})
    assert error.status == 400
    assert error.param == param
    assert param in error.message
    assert len(error.message) < 300


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": HI * 5000}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "ghost", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages.0.content.0",
    ),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_FAULTS)
def test_faults_of_a_chat_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, {"messages": HI, **fields})
    assert (error.status, error.param) == (400, param)


def test_null_is_absent_everywhere() -> None:
    fields = {name: None for name in ChatRequest.model_fields if name != "messages"}
    message = {"role": "user", "content": "hi", "name": None, "tool_calls": None, "unheard_of": None}
    body = validate(ChatRequest, {**fields, "messages": [message], "tools": None, "response_format": None})
    assert body == validate(ChatRequest, {"messages": HI})


def test_a_whole_float_is_an_integer() -> None:
    assert validate(CompletionRequest, {"prompt": "x", "max_tokens": 3.0}).max_tokens == 3


@pytest.mark.parametrize("field", ["seed", "priority"])
def test_an_integer_that_was_rounded_is_none(field: str) -> None:
    """The parser makes a float of what has more than 64 bits; another float may stand for several integers."""
    for text in (b"%d" % 2**53, b"-%d" % 2**63, b"%d.0" % (2**53 - 1)):
        value = parse_json_object(b'{"prompt": "x", "%b": %b}' % (field.encode(), text))
        assert getattr(validate(CompletionRequest, value), field) == int(float(text))
    for text in (b"%d" % 2**64, b"-%d" % (2**63 + 1), b"%d.0" % 2**53, b"1e18", b"-1e300"):
        value = parse_json_object(b'{"prompt": "x", "%b": %b}' % (field.encode(), text))
        assert refusal(CompletionRequest, value).param == field


def test_a_long_list_is_measured_before_it_is_read() -> None:
    """Its entries are not even looked at: the first one would be a fault of its own."""
    for model, fields, param, limit in (
        (DetokenizeRequest, {"tokens": ["a"] * (MAX_TOKENS + 1)}, "tokens", MAX_TOKENS),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["a"] * 300_000}, "allowed_token_ids", 262_144),
    ):
        error = refusal(model, fields)
        assert error.param == param
        assert f"at most {limit} entries" in error.message


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"content": "a", "inputs": "b"}, "content"),
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": [1], "ids": [1]}, "tokens"),
        (DetokenizeRequest, {"ids": [1, "a", "b"]}, "ids.1"),
    ],
)
def test_faults_of_tokens_name_the_field(model: type[Body], fields: dict[str, Any], param: str) -> None:
    assert refusal(model, fields).param == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1", "JSON"),
        (b'{"a": "\xff"}', "JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e400}', "JSON"),
        (b'{"a": "x\\ud83d"}', "a: "),
        (b'{"a": {"b": ["", "x\\ud83d"]}}', "a.b.1: "),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "levels"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "levels"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_bad_json(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


def test_good_json() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest) is not None
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert len(parse_json(b"[" + b"[]," * 1000 + b"[]]")) == 1001
