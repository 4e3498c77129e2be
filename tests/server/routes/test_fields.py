"""The lesser fields of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from server.errors import EngineError
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running

HI = [{"role": "user", "content": "hi"}]
PREFILL = [*HI, {"role": "assistant", "content": "Well, "}]
READING = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"


def parts(chunks: list[Any], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]


def error(reply: Any) -> tuple[int, str, str]:
    body = reply.json()["error"]
    return reply.status_code, body["code"], body["param"]


@pytest.mark.parametrize("interval", [1, 4, 100])
def test_an_interval_groups_tokens(server: Running, interval: int) -> None:
    """The first comes at once, and so does what is left at the end; the text is the same."""
    server.engine.interval = 0.02  # else a slow reader finds several tokens in one event
    fields = {"prompt": "x", "max_tokens": 12, "return_token_ids": True}
    chunks = server.stream(COMPLETIONS, **fields, stream_interval=interval)
    sizes = [len(part["token_ids"]) for part in parts(chunks)]
    assert sum(sizes) == 12
    assert sizes[0] == 1 or sizes[0] < interval
    assert all(size >= interval for size in sizes[1:-1])
    assert len(sizes) <= 2 + 11 // interval
    assert "".join(part["text"] for part in parts(chunks)) == server.complete(**fields).json()["choices"][0]["text"]


def break_all(server: Running) -> None:
    for stream in list(server.service.client.live.values()):
        server.service.client.fail(stream, EngineError("broken"))


def test_what_waits_for_an_interval_is_sent_before_an_error(server: Running) -> None:
    server.engine.interval = 0.01
    with server.client.stream(
        "POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 900, "stream": True, "stream_interval": 1000}
    ) as reply:
        server.engine.wait_for(lambda engine: any(len(s.tokens) > 5 for s in engine.sequences))
        server.call(lambda: break_all(server))
        text = reply.read().decode()
    assert text.count('"text":') >= 2
    assert '"error"' in text


def test_best_of(server: Running) -> None:
    """More run than come back; equal ones in their order."""
    body = server.complete(n=2, best_of=5).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert server.engine.submits()[-1].n == 5
    assert body["usage"]["completion_tokens"] == 20
    assert len(server.chat(n=1, best_of=3).json()["choices"]) == 1
    assert error(server.complete(best_of=3, stream=True)) == (400, "invalid_value", "best_of")
    assert error(server.complete(best_of=1, n=2)) == (400, "invalid_value", "best_of")
    assert error(server.complete(prompt=["x"] * 200, best_of=8)) == (400, "invalid_value", "best_of")
    assert len(server.stream(COMPLETIONS, prompt="x", n=2, best_of=2)) > 2


def test_the_prompt_comes_back_as_text(server: Running, smol: Tokenizer) -> None:
    fields = {"return_prompt_text": True}
    assert server.complete(**fields).json()["choices"][0]["prompt_text"] == "Once"
    ids = smol.encode("two words", add_special_tokens=False)
    assert server.complete(prompt=ids, **fields).json()["choices"][0]["prompt_text"] == "two words"
    cut = server.complete(prompt="one two three", truncate_prompt_tokens=1, **fields).json()
    assert cut["choices"][0]["prompt_text"] == " three"
    first, *others = parts(server.stream(COMPLETIONS, prompt="x", max_tokens=4, **fields))
    assert first["prompt_text"] == "x"
    assert not any("prompt_text" in part for part in others)
    text = server.chat(**fields).json()["prompt_text"]
    assert "<|im_start|>user\nhi<|im_end|>" in text
    first, *others = parts(server.stream(CHAT, messages=HI, max_tokens=4, **fields))
    assert first["prompt_text"] == text
    assert not any("prompt_text" in part for part in others)


def test_timings_on_demand(server: Running) -> None:
    assert "timings" not in server.chat().json()
    timings = server.chat(timings_per_token=True).json()["timings"]
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] > 0
    assert all(value >= 0 for value in timings.values())
    for path, given in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
        usage = {"stream_options": {"include_usage": True}}
        *chunks, last, _ = server.stream(path, **given, max_tokens=4, timings_per_token=True, **usage)
        assert all("timings" in chunk and chunk["usage"] is None for chunk in chunks)
        assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"] == 4
        assert all("usage" not in c for c in server.stream(path, **given, max_tokens=4, timings_per_token=True)[:-1])


def test_chat_echoes_the_assistants_last_message(server: Running) -> None:
    fields = {"messages": PREFILL, "max_tokens": 4, "continue_final_message": True}
    plain = server.chat(**fields).json()["choices"][0]["message"]["content"]
    whole = server.chat(**fields, echo=True, n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == ["Well, " + plain] * 2
    chunks = server.stream(CHAT, **fields, echo=True, n=2)
    for index in range(2):
        assert "".join(part["delta"].get("content", "") for part in parts(chunks, index)) == "Well, " + plain
        assert [part["delta"].get("role") for part in parts(chunks, index)][1:].count("assistant") == 0
    assert server.chat(echo=True).json()["choices"] == server.chat().json()["choices"]


def test_a_chat_is_cut_where_the_client_wants_that(server: Running, smol: Tokenizer) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    assert error(server.chat(messages=long))[1] == "context_length_exceeded"
    for side in ("left", "right"):
        reply = server.chat(messages=long, truncate_prompt_tokens=50, truncation_side=side).json()
        assert reply["usage"]["prompt_tokens"] == 50
        ids = server.engine.submits()[-1].prompt_ids
        assert smol.decode(ids, skip_special=False).endswith("assistant\n") == (side == "left")
    room = server.service.require().ready.max_model_len - 4
    assert server.chat(messages=long, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == room
    huge = [{"role": "user", "content": "w" * 2_000_000}]
    assert error(server.chat(messages=huge, truncate_prompt_tokens=5))[2] == "messages"


def test_templates_and_documents_that_this_server_does_not_take(server: Running) -> None:
    assert error(server.chat(chat_template="x")) == (400, "unsupported_parameter", "chat_template")
    assert error(server.chat(documents=[{"text": "t"}])) == (400, "unsupported_parameter", "documents")
    assert server.chat(documents=[]).status_code == 200


@pytest.fixture(scope="module")
def open_server(smol: Tokenizer) -> Iterator[Running]:
    """Takes templates from requests, and no fields that it does not know."""
    with running(smol, trust_request_chat_template=True, strict_fields=True) as server:
        yield server


def test_a_template_of_the_request(open_server: Running) -> None:
    documents = [{"title": "A", "text": "first"}, {"title": "B", "text": "<|im_end|>"}]
    reply = open_server.chat(chat_template=READING, documents=documents, return_prompt_text=True).json()
    assert reply["prompt_text"] == "[A: first][B: <|im_end|>]hi"
    ids = open_server.engine.submits()[-1].prompt_ids
    assert 2 not in ids, "what a document spells out is no special token"
    reply = open_server.post("/tokenize", {"messages": HI, "chat_template": "{{ messages[0].content }}"})
    assert reply.json()["count"] == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ x | nofilter }}",
        "{{ raise_exception('no') }}",
        r"{{ raise_exception('\ud83d') }}",
        "{{ messages | tojson(indent=100000000) }}",
        "{{ 9" + "9" * 5000 + " }}",
        "{{ [1] | batch(1000000000) | list }}",
    ],
)
def test_a_template_of_the_request_that_is_bad(open_server: Running, source: str) -> None:
    status, code, _ = error(open_server.chat(chat_template=source))
    assert (status, code) == (400, "template_error")


def test_strict_fields(open_server: Running) -> None:
    assert open_server.chat().status_code == 200
    assert error(open_server.chat(foo=1)) == (400, "unknown_parameter", "foo")
    assert error(open_server.complete(**{"f\n\x00o": 1}))[:2] == (400, "unknown_parameter")
    nested = {"stream": True, "stream_options": {"include_everything": True}}
    assert error(open_server.chat(**nested)) == (400, "unknown_parameter", "stream_options.include_everything")
    assert open_server.chat(foo=None).status_code == 200


def test_unknown_fields_are_ignored_elsewhere(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And named in the log, once, without their value."""
    monkeypatch.setattr("server.protocol.base._unknown_names", set())  # once a process, and others may have sent it
    caplog.set_level("INFO", "octavo.protocol")
    for _ in range(2):
        assert server.chat(unheard_of="private").status_code == 200
    assert caplog.messages == ["ignored an unknown request field: 'unheard_of'"]


HARMLESS: dict[str, Any] = {
    "store": True,
    "metadata": {"k": "v"},
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "moderation": {"mode": "off"},
    "request_id": "r",
    "rid": "r",
    "session_id": "s",
    "user": "u",
    "service_tier": "auto",
    "spaces_between_special_tokens": False,
    "stream_interval": 3,
    "priority": -5,
}
CHAT_HARMLESS = {"verbosity": "low", "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]}}


def test_harmless_fields_change_nothing(open_server: Running) -> None:
    """And are known, so that strict servers take them."""
    plain, given = open_server.chat(), open_server.chat(**HARMLESS, **CHAT_HARMLESS)
    assert given.status_code == 200, given.text
    assert plain.json()["choices"] == given.json()["choices"]
    assert given.json()["service_tier"] == "default"
    assert "service_tier" not in plain.json()
    assert open_server.complete(**HARMLESS).json()["choices"] == open_server.complete().json()["choices"]
    chunks = open_server.stream(CHAT, messages=HI, max_tokens=2, service_tier="flex")
    assert {chunk["service_tier"] for chunk in chunks[:-1]} == {"default"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 64),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"service_tier": "platinum"}, "service_tier"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"documents": ["text"]}, "documents.0"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"n_predict": 5}, "n_predict"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
def test_what_is_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.chat(**fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert server.engine.submits() == []


COMPLETION, RESPONSE = {"prompt": "x"}, {"input": "x"}
MESSAGE = {"model": MODEL, "messages": HI, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (COMPLETIONS, COMPLETION, {"messages": HI}),
        (COMPLETIONS, COMPLETION, {"max_completion_tokens": 2}),
        (COMPLETIONS, COMPLETION, {"top_logprobs": 2}),
        (COMPLETIONS, COMPLETION, {"tool_choice": "required"}),
        (COMPLETIONS, COMPLETION, {"reasoning_effort": "low"}),
        (COMPLETIONS, COMPLETION, {"include_reasoning": False}),
        (COMPLETIONS, COMPLETION, {"separate_reasoning": True}),
        (COMPLETIONS, COMPLETION, {"reasoning_format": "deepseek"}),
        (COMPLETIONS, COMPLETION, {"add_generation_prompt": True}),
        ("/v1/responses", RESPONSE, {"logprobs": True}),
        ("/v1/responses", RESPONSE, {"reasoning_effort": "low"}),
        ("/v1/responses", RESPONSE, {"functions": [{"name": "f"}]}),
        ("/v1/messages", MESSAGE, {"n": 2}),
        ("/v1/messages", MESSAGE, {"stop": ["a"]}),
        ("/v1/messages", MESSAGE, {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_another_route_knows_is_not_ignored(
    server: Running, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    (param,) = fields
    assert error(server.post(path, body | fields)) == (400, "unsupported_parameter", param)
    assert server.post(path, body | {"max_tokens": 2, "function_call": "auto", "n": 1}).status_code == 200
