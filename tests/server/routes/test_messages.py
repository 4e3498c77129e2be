from __future__ import annotations

import json
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from tests.server.routes.test_responses import CALL, SCHEMA, say
from tests.server.running import MODEL, Running, running

MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def ask(server: Running, messages: Any = HI, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 64, "messages": messages, **fields}
    reply = server.post(MESSAGES, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(server: Running, messages: Any = HI, **fields: Any) -> list[Any]:
    """The events of a stream, held to the order that clients rely on."""
    body = {"model": MODEL, "max_tokens": 64, "messages": messages, "stream": True, **fields}
    reply = server.post(MESSAGES, body)
    assert reply.status_code == 200, reply.text
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        head, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def summed(events: list[Any]) -> Any:
    """The message that a client puts together."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block, text = None, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block, text = dict(event["content_block"]), ""
            message["content"].append(open_block)
        elif event["type"] == "content_block_delta":
            assert open_block is not None
            kind = event["delta"].pop("type")
            assert (
                kind
                == {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[
                    open_block["type"]
                ]
            )
            (piece,) = event["delta"].values()
            text += piece
        else:
            assert event["type"] == "content_block_stop"
            assert open_block is not None
            assert event["index"] == len(message["content"]) - 1
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(text)
            else:
                open_block[open_block["type"]] = text
            open_block = None
    assert open_block is None
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def check_both(server: Running, messages: Any = HI, **fields: Any) -> Any:
    """The whole answer, which is the one that is streamed."""
    whole = ask(server, messages, **fields)
    pieced = summed(stream(server, messages, **fields))
    for block in (*whole["content"], *pieced["content"]):
        assert block.pop("id", "call_").startswith("call_")
    assert {**whole, "id": ""} == {**pieced, "id": ""}
    return whole


def prompt(server: Running, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(server.engine.submits()[-1].prompt_ids, skip_special=False)


def test_a_message(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Good morning to you.")
    body = check_both(server, system="Be kind.", temperature=0.5, top_k=5)
    assert body["content"] == [{"type": "text", "text": "Good morning to you."}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert prompt(server, smol).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    submit = server.engine.submits()[-1]
    assert (submit.params.temperature, submit.params.top_k, submit.params.max_tokens) == (0.5, 5, 64)
    assert body["usage"]["input_tokens"] == len(submit.prompt_ids)
    assert body["usage"]["output_tokens"] == len(server.engine.reply)


def test_reasons_to_stop(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "One two three four.")
    cut = check_both(server, max_tokens=2)
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "One two")
    stopped = check_both(server, stop_sequences=["four", " three"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " three")
    assert stopped["content"][0]["text"] == "One two"
    say(server, smol, "")
    assert check_both(server)["content"] == []


def test_calls(server: Running, smol: Tokenizer) -> None:
    say(server, smol, f"I look. {CALL}{CALL}")
    body = check_both(server, tools=[WEATHER])
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "tool_use"]
    assert body["content"][1] == {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}}
    assert body["stop_reason"] == "tool_use"
    alone = check_both(server, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in alone["content"]] == ["text", "tool_use"]
    none = check_both(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]


def test_a_forced_call_is_the_only_one_unless_more_are_asked_for(server: Running, smol: Tokenizer) -> None:
    """A small model that has to call, and may call again, never ends. Clients hardly ever say which they mean."""
    say(server, smol, CALL)
    grammars = []
    for more in ({}, {"disable_parallel_tool_use": True}, {"disable_parallel_tool_use": False}):
        ask(server, tools=[WEATHER], tool_choice={"type": "any", **more})
        grammars.append(server.engine.submits()[-1].params.grammar)
    assert grammars[0] == grammars[1] != grammars[2]


def test_a_call_that_is_cut_short(server: Running, smol: Tokenizer) -> None:
    say(server, smol, CALL)
    tokens = len(smol.encode(CALL[: CALL.index('me"}}')], add_special_tokens=False))
    (block,) = ask(server, tools=[WEATHER], max_tokens=tokens)["content"]
    assert block["type"] == "tool_use"
    assert block["input"] in ({}, {"city": "Ro"})


def test_half_a_surrogate_pair_in_a_call(server: Running, smol: Tokenizer) -> None:
    """The model may spell one out; the arguments come all the same."""
    say(server, smol, CALL.replace("Rome", r"Rome \ud83d"))
    (block,) = ask(server, tools=[WEATHER])["content"]
    assert block["input"] == {"city": "Rome \ufffd"}


def test_results_go_back(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Sunny.")
    used = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Röme"}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "21 degrees"}]},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, used]},
        {"role": "user", "content": results},
    ]
    ask(server, history, tools=[WEATHER])
    text = prompt(server, smol)
    places = [text.index(part) for part in ("weather?", "I look.", "Röme", "21 degrees", "So?")]
    assert places == sorted(places)


def test_thinking(smol: Tokenizer) -> None:
    with running(smol, reasoning_parser="think") as server:
        say(server, smol, "<think>Let me see.</think>\n\nYes.")
        body = check_both(server, thinking={"type": "enabled", "budget_tokens": 1024})
        assert body["content"] == [
            {"type": "thinking", "thinking": "Let me see.", "signature": ""},
            {"type": "text", "text": "Yes."},
        ]
        ask(server, thinking={"type": "disabled"})


def test_a_beginning_to_go_on_with(server: Running, smol: Tokenizer) -> None:
    ask(server, [*HI, {"role": "assistant", "content": "The answer is"}])
    assert prompt(server, smol).endswith("assistant\nThe answer is")


def test_counting(server: Running) -> None:
    fields = {"system": [{"type": "text", "text": "Be kind."}], "tools": [WEATHER]}
    body = server.post(f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": HI, **fields}).json()
    ask(server, **fields)
    assert body == {"input_tokens": len(server.engine.submits()[-1].prompt_ids)}


BASE = {"model": MODEL, "max_tokens": 4, "messages": HI}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["x"] * 100000}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_faults_have_anthropics_shape(server: Running, fields: dict[str, Any], param: str) -> None:
    for more in ({}, {"stream": True}):
        reply = server.post(MESSAGES, {**BASE, **fields, **more})
        assert reply.status_code == 400, reply.text
        body = reply.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["param"] == param
        assert param in body["error"]["message"]


def test_other_failures(smol: Tokenizer) -> None:
    with running(smol, api_key=["k"]) as server:
        key = {"x-api-key": "k"}
        cases = [
            (server.post(MESSAGES, BASE), 401, "authentication_error"),
            (server.post(MESSAGES, BASE, **{"x-api-key": "wrong"}), 401, "authentication_error"),
            (server.post(MESSAGES, {**BASE, "model": "nope"}, **key), 404, "not_found_error"),
            (server.post(MESSAGES, b"{", **key), 400, "invalid_request_error"),
            (server.client.get(MESSAGES, headers=key), 405, "invalid_request_error"),
            (server.post(f"{MESSAGES}/batches", BASE, **key), 404, "not_found_error"),
            (server.post(f"{MESSAGES}/count_tokens", {"model": "nope", "messages": HI}, **key), 404, "not_found_error"),
        ]
        for reply, status, kind in cases:
            assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
        assert server.post(MESSAGES, BASE, **key).status_code == 200
        assert "error" in server.post("/v1/responses", {}, **key).json(), "the others keep OpenAI's"
        server.engine.fail_with = "the model failed"
        assert server.post(MESSAGES, BASE, **key).json()["error"]["type"] == "api_error"
        reply = server.post(MESSAGES, {**BASE, "stream": True}, **key)
        last = reply.text.strip().split("\n\n")[-1].split("\n")
        assert last[0] == "event: error"
        assert json.loads(last[1].removeprefix("data: "))["error"]["message"] == "the model failed"


def test_nulls_are_absent(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Yes.")
    names = (
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "stop_sequences",
        "temperature",
        "metadata",
        "stream",
        "top_k",
    )
    ask(server, **dict.fromkeys(names))


def test_the_form_of_a_text(server: Running, smol: Tokenizer) -> None:
    say(server, smol, '{"ok": true}')
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        ask(server, **fields)
        assert server.engine.submits()[-1].params.grammar is not None
    wrong = {"output_config": {"format": {**form, "schema": {"type": "nope"}}}}
    error = server.post(MESSAGES, {**BASE, **wrong}).json()["error"]
    assert (error["param"], error["code"]) == ("output_config.format.schema", "invalid_grammar")


def test_forced_calls(server: Running, smol: Tokenizer) -> None:
    say(server, smol, CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        ask(server, tools=[WEATHER], tool_choice=choice)
        assert server.engine.submits()[-1].params.grammar is not None
