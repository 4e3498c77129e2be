from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from model.tokenizer import Tokenizer
from server.logprobs import TokenEntry
from server.pieces import Content
from server.response_output import ResponseOutput
from tests.server.running import Running, running

RESPONSES = "/v1/responses"
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a line."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def say(server: Running, tokenizer: Tokenizer, text: str) -> None:
    """Let the model answer with a text, and end."""
    server.engine.reply = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_ids]


def respond(server: Running, input: Any = "hi", status: int = 200, **fields: Any) -> Any:
    reply = server.post(RESPONSES, {"input": input, **fields})
    assert reply.status_code == status, reply.text
    if status == 200:
        Response.model_validate(reply.json(), strict=True)
    return reply.json()


def frames(text: str) -> list[Any]:
    """The events of a stream; every one has a line with its type, and the types are the SDK's."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        head, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def stream(server: Running, input: Any = "hi", **fields: Any) -> list[Any]:
    reply = server.post(RESPONSES, {"input": input, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    events = frames(reply.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    terminal = {"response.completed", "response.incomplete", "response.failed"}
    assert [event["type"] in terminal for event in events] == [False] * (len(events) - 1) + [True]
    return events


def check_items(events: list[Any]) -> list[Any]:
    """Every item is opened, grows and is closed, and is the one of the final response."""
    final = events[-1]["response"]
    opened = [event for event in events if event["type"] == "response.output_item.added"]
    closed = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in opened] == list(range(len(final["output"])))
    assert [event["item"] for event in closed] == final["output"]
    assert [event["item"]["id"] for event in opened] == [item["id"] for item in final["output"]]
    for number, item in enumerate(final["output"]):
        about = [event for event in events if event.get("output_index") == number]
        assert about[0]["type"].endswith("item.added")
        assert about[-1]["type"].endswith("item.done")
        assert {event["item_id"] for event in about[1:-1]} <= {item["id"]}
        joined = "".join(event["delta"] for event in about if event["type"].endswith(".delta"))
        (done,) = (
            event
            for event in about
            if event["type"].endswith((".text.done", "text.done", "arguments.done", "input.done"))
        )
        said = next(done[key] for key in ("text", "arguments", "input") if key in done)
        shown = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert joined == said == shown
    return list(final["output"])


def test_a_whole_response(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Good morning.")
    body = respond(
        server, metadata={"a": "b"}, temperature=0.5, max_output_tokens=20, user="u", instructions="Be kind."
    )
    (item,) = body["output"]
    assert item["content"] == [{"type": "output_text", "text": "Good morning.", "annotations": []}]
    assert (item["role"], item["status"], body["status"]) == ("assistant", "completed", "completed")
    echoed = (
        "metadata",
        "temperature",
        "max_output_tokens",
        "user",
        "instructions",
        "store",
        "tool_choice",
        "truncation",
    )
    assert [body[name] for name in echoed] == [{"a": "b"}, 0.5, 20, "u", "Be kind.", True, "auto", "disabled"]
    assert body["id"].startswith("resp_")
    assert body["completed_at"] >= body["created_at"]
    submit = server.engine.submits()[-1]
    usage = body["usage"]
    assert usage["input_tokens"] == len(submit.prompt_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    prompt = smol.decode(submit.prompt_ids, skip_special=False)
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>")
    assert submit.params.temperature == 0.5


def test_a_stream(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Good morning to you all.")
    server.engine.interval = 0.02  # else a slow reader finds everything in one event
    events = stream(server)
    (item,) = check_items(events)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert deltas > 1
    assert item["content"][0]["text"] == "Good morning to you all."
    constant = {
        json.dumps([event["response"][name] for name in ("id", "created_at", "model")])
        for event in events
        if "response" in event
    }
    assert len(constant) == 1
    whole = respond(server)
    assert {k: v for k, v in whole.items() if k not in ("id", "output", "created_at", "completed_at")} == {
        k: v for k, v in events[-1]["response"].items() if k not in ("id", "output", "created_at", "completed_at")
    }


def test_cut_short(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "This is a sentence that goes on.")
    events = stream(server, max_output_tokens=3)
    (item,) = check_items(events)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "This is a")
    for limit in ({"max_output_tokens": 3}, {"max_tokens": 3}, {"max_output_tokens": 3, "max_tokens": 9}):
        whole = respond(server, **limit)
        assert (whole["status"], whole["max_output_tokens"]) == ("incomplete", 3)


def test_nothing_at_all(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "")
    (item,) = check_items(stream(server))
    assert item["content"][0]["text"] == ""


def test_calls(server: Running, smol: Tokenizer) -> None:
    say(server, smol, f"I look. {CALL}{CALL}")
    events = stream(server, tools=[WEATHER])
    text, first, second = check_items(events)
    assert text["content"][0]["text"] == "I look."
    assert {first["type"], second["type"]} == {"function_call"}
    assert json.loads(first["arguments"]) == {"city": "Rome"}
    assert first["call_id"] != second["call_id"]
    assert first["status"] == "completed"
    whole = respond(server, tools=[WEATHER])
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["tools"] == [WEATHER]
    assert len(respond(server, tools=[WEATHER], parallel_tool_calls=False)["output"]) == 2


def test_results_go_back(server: Running, smol: Tokenizer) -> None:
    say(server, smol, CALL)
    (call,) = respond(server, "weather?", tools=[WEATHER])["output"]
    say(server, smol, "Sunny.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
    body = respond(server, [{"role": "user", "content": "weather?"}, call, result], tools=[WEATHER])
    assert body["output"][0]["content"][0]["text"] == "Sunny."
    prompt = smol.decode(server.engine.submits()[-1].prompt_ids, skip_special=False)
    assert prompt.index("weather?") < prompt.index('"city": "Rome"') < prompt.index("21 degrees")


def test_custom_tools(server: Running, smol: Tokenizer) -> None:
    say(server, smol, '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>')
    (item,) = check_items(stream(server, tools=[SHELL]))
    assert (item["type"], item["input"]) == ("custom_tool_call", "ls -l")
    result = {
        "type": "custom_tool_call_output",
        "call_id": item["call_id"],
        "output": [{"type": "input_text", "text": "a b"}],
    }
    respond(server, [{"role": "user", "content": "list"}, item, result], tools=[SHELL])
    assert "a b" in smol.decode(server.engine.submits()[-1].prompt_ids)


def test_reasoning(smol: Tokenizer) -> None:
    with running(smol, reasoning_parser="think") as server:
        say(server, smol, "<think>Let me see.</think>\n\nYes.")
        events = stream(server)
        thought, text = check_items(events)
        assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert (thought["summary"], text["content"][0]["text"]) == ([], "Yes.")
        assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert respond(server, [{"role": "user", "content": "q"}, thought, text, {"role": "user", "content": "r"}])[
            "output"
        ]


def test_logprobs(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "One two three.")
    events = stream(server, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    (item,) = check_items(events)
    scores = item["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in scores) == "One two three."
    assert scores == deltas
    assert all(len(entry["top_logprobs"]) == 2 for entry in scores)
    assert "logprobs" not in respond(server)["output"][0]["content"][0]


def test_logprobs_are_those_of_the_message(smol: Tokenizer) -> None:
    """Tokens of reasoning, of calls and of their markers are no part of it, in however few events all comes."""
    with running(smol, reasoning_parser="think") as server:
        say(server, smol, f"<think>\nHm, Rome.\n</think>\n\nRome {CALL} it is.")
        fields: dict[str, Any] = {"tools": [WEATHER], "include": ["message.output_text.logprobs"]}
        for pause in (0.001, 0):
            server.engine.interval = pause
            for items in (respond(server, **fields)["output"], check_items(stream(server, **fields))):
                parts = [item["content"][0] for item in items if item["type"] == "message"]
                assert [part["text"] for part in parts] == ["Rome", " it is."]
                for part in parts:
                    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]


def test_a_token_across_the_beginning_of_a_message() -> None:
    """Only what is the message's counts, as where a stop string cuts a token."""
    output = ResponseOutput(scored=True)
    entries = [TokenEntry(1, "k", b"k", -0.5, (), 6), TokenEntry(2, "> b", b"> b", -0.5, (), 7)]
    (*_, delta) = output.feed([Content("b", 9)], entries)
    assert [(entry.token, entry.bytes) for entry in delta["logprobs"]] == [("b", list(b"> b"))]


def test_input_tokens(server: Running) -> None:
    fields: dict[str, Any] = {"input": "How many?", "instructions": "Count.", "tools": [WEATHER]}
    body = server.post(f"{RESPONSES}/input_tokens", fields).json()
    InputTokenCountResponse.model_validate(body, strict=True)
    respond(server, **fields)
    assert body["input_tokens"] == len(server.engine.submits()[-1].prompt_ids)


def test_a_failure_within_a_stream(server: Running) -> None:
    server.engine.fail_with = "the model failed on this request"
    reply = server.post(RESPONSES, {"input": "hi", "stream": True})
    events = frames(reply.text)
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "error", "response.failed")
    ]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["message"] == events[-2]["message"] == "the model failed on this request"
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert respond(server, status=500)["error"]["code"] == "engine_error"
    server.engine.fail_with = None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input.0"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "x", "tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools.0.parameters"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include.0"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "word " * 3000}, "input"),
        ({"input": "x", "metadata": {"k": 1}}, "metadata.k"),
        ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "x", "stream_options": {}, "stream": False}, "stream_options"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "model": "nope"}, "model"),
    ],
)
def test_faults(server: Running, fields: dict[str, Any], param: str) -> None:
    for more in ({}, {"stream": True}):
        reply = server.post(RESPONSES, {**more, **fields})
        assert reply.status_code in (400, 404), reply.text
        assert reply.headers["content-type"] == "application/json"
        error = reply.json()["error"]
        assert error["param"] == param, error
        assert param in error["message"] or reply.status_code == 404


def test_nulls_are_absent(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Yes.")
    names = (
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "metadata",
        "include",
        "stream",
        "store",
        "top_p",
    )
    nulls: dict[str, Any] = dict.fromkeys((*names, "previous_response_id", "background", "truncation", "conversation"))
    respond(server, "hi", **nulls)


def test_a_client_that_leaves(server: Running) -> None:
    server.engine.interval = 0.02
    server.engine.reply = list(range(1000, 1032))
    with server.client.stream("POST", RESPONSES, json={"input": "x", "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: response.created"
    server.engine.wait_for(lambda engine: bool(engine.aborts()) and not engine.sequences)
    server.wait(lambda: server.service.admission.sequences == 0)
    server.engine.interval = 0.001


def test_metrics(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Yes.")
    before = server.metric("octavo_requests_total", endpoint="responses", finish_reason="stop")
    respond(server)
    server.wait(
        lambda: server.metric("octavo_requests_total", endpoint="responses", finish_reason="stop") == before + 1
    )


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_the_form_of_a_text(server: Running, smol: Tokenizer) -> None:
    say(server, smol, '{"ok": true}')
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    body = respond(server, text={"format": form})
    grammar = server.engine.submits()[-1].params.grammar
    assert grammar is not None
    assert body["text"]["format"] == form
    respond(server, text={"format": {"type": "json_object"}})
    assert server.engine.submits()[-1].params.grammar not in (None, grammar)
    respond(server, structured_outputs={"choice": ["yes"]})
    assert server.engine.submits()[-1].params.grammar is not None
    error = respond(server, text={"format": {**form, "schema": {"type": "nope"}}}, status=400)["error"]
    assert (error["param"], error["code"]) == ("text.format.schema", "invalid_grammar")
    for more in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["a"]}}):
        both: dict[str, Any] = {"text": {"format": form}, **more}
        assert respond(server, status=400, **both)["error"]["code"] == "invalid_value"


def test_forced_calls(server: Running, smol: Tokenizer) -> None:
    say(server, smol, CALL)
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        respond(server, tools=[WEATHER], tool_choice=choice)
        assert server.engine.submits()[-1].params.grammar is not None
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    assert respond(server, tools=[WEATHER, SHELL], tool_choice=allowed)["tool_choice"] == allowed
