"""The document is about the server that serves it: every answer is one that it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from model.tokenizer import Tokenizer
from server.app import ROUTES
from server.openapi import OPERATIONS
from server.shapes import SHAPES
from tests.server.routes.test_responses import CALL, WEATHER, say
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER["parameters"]}}
ANTHROPIC = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
BLOCKS = [
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "hello"}]},
    *HI,
]
ASIDES = {"return_prompt_text": True, "timings_per_token": True, "service_tier": "auto"}
CITY = {"type": "json_schema", "name": "city", "schema": {"type": "string"}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 3, "n": 2}),
    (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True},
    ),
    (CHAT, {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 3, "use_beam_search": True, **ASIDES}),
    (CHAT, {"messages": HI, "max_tokens": 3, "prompt_logprobs": 1, **ASIDES}),
    (CHAT, {"messages": HI, "tools": [TOOL]}),
    (CHAT, {"messages": HI, "functions": [TOOL["function"]]}),
    ("/v1/chat/completions/input_tokens", {"messages": HI}),
    ("/v1/responses", {"input": "hi", "tools": [WEATHER], "top_logprobs": 1}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/responses", {"input": "hi", "service_tier": "flex", "prompt_cache_key": "x", "safety_identifier": "x"}),
    ("/v1/responses", {"input": "hi", "text": {"format": CITY, "verbosity": "low"}, "metadata": {"a": "b"}}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 99, "messages": HI, "tools": [ANTHROPIC]}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": HI}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 0, "messages": BLOCKS}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": HI}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": [5], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("/tokenize", {"content": "a b", "with_pieces": True}),
    ("/tokenize", {"inputs": "a b"}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": HI}),
]

CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
ITEMS = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}], "phase": "commentary"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}], "status": "completed"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "x"},
    {"role": "user", "content": "hi"},
]
DESCRIBED = [CALLED, {"role": "tool", "tool_call_id": "1", "content": "x"}, {"role": "assistant", "content": "x"}]
THOUGHT, ROLES = {"type": "redacted_thinking", "data": "x"}, ("system", "user")
WRONG: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "assistant"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}),
    (CHAT, {"messages": HI, "tools": [{"type": "custom", "function": {"name": "f"}}]}),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}}),
    (CHAT, {"messages": HI, "functions": [TOOL["function"]], "function_call": {"name": ""}}),
    ("/v1/responses", {"input": []}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": []}),
    *(
        ("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": [{"role": role, "content": [THOUGHT]}]})
        for role in ROLES
    ),
    ("/v1/messages", {"model": MODEL, "max_tokens": -1, "messages": HI}),
    (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 2, "messages": HI, "tools": [ANTHROPIC], "tool_choice": {"type": "tool"}},
    ),
    *((CHAT, {"messages": HI, name: 0}) for name in ("max_tokens", "max_completion_tokens")),
    *(("/v1/responses", {"input": "hi", name: 0}) for name in ("max_tokens", "max_output_tokens")),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}),
    (CHAT, {"messages": HI, "tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", "content": "b"}),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": [5], "ids": [5]}),
]
"""Wrong, and described as such: what schemathesis could not tell from right ones before."""


def closed(schema: Any) -> Any:
    """The same without a place for fields that it does not have, so that none goes undescribed."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: closed(part) for name, part in schema.items()}
    return {"additionalProperties": False, **whole} if "properties" in schema and "required" in schema else whole


def check(document: dict[str, Any], method: str, path: str, reply: Any) -> None:
    """The answer's status is described, and its body fits the schema that stands there."""
    described = document["paths"][path][method]["responses"][str(reply.status_code)]
    kind = reply.headers["content-type"].partition(";")[0]
    schema = described["content"][kind]["schema"]
    components = document["components"] if reply.status_code != 200 else {"schemas": closed(SHAPES)}
    validator = jsonschema.Draft202012Validator({**schema, "components": components})
    if kind == "application/json":
        validator.validate(reply.json())
    if kind == "text/event-stream":
        blocks = [block.split("\n") for block in reply.text.split("\n\n") if block and not block.startswith(":")]
        assert blocks
        name = components["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]["data"]["contentSchema"]
        data = jsonschema.Draft202012Validator({**name, "components": components})
        for lines in blocks:
            event = dict(line.split(": ", 1) for line in lines)
            validator.validate(event)
            if event["data"] != "[DONE]":
                data.validate(json.loads(event["data"]))


@pytest.fixture
def document(server: Running, smol: Tokenizer) -> dict[str, Any]:
    say(server, smol, f"I look. {CALL}")
    whole: dict[str, Any] = server.client.get("/openapi.json").json()
    return whole


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)
    served = {
        (method.lower(), re.sub(r":path", "", route.path))
        for route in ROUTES
        if getattr(route, "include_in_schema", True)
        for method in route.methods or ()
    }
    assert served - {("head", path) for _, path in served} == described


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    names = set(re.findall(r"#/components/schemas/([^\"']+)", str(document)))
    assert names <= set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_bounds_of_numbers_are_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["n"] | {"title": "N"} == {
        **{"type": "integer", "minimum": 1, "maximum": 128, "default": 1, "title": "N"}
    }
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            assert not {"ge", "le", "gt", "lt"} & {key for kind in field.get("anyOf", [field]) for key in kind}, name


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_answers_to_bodies(server: Running, document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    """The request is one that is described, too, and so is what a wrong one gets."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    check(document, "post", path, reply)
    for wrong, status in ((b"{", 400), (b'{"model": 5}', 400), ({**body, "model": "nope"}, 404)):
        reply = server.post(path, wrong)
        assert reply.status_code == status
        check(document, "post", path, reply)
    reply = server.post(path, body, **{"content-type": "text/plain"})
    assert reply.status_code == 415
    check(document, "post", path, reply)
    if "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]:
        plain = {name: value for name, value in body.items() if name != "prompt_logprobs"}
        check(document, "post", path, server.post(path, {**plain, "stream": True}))
        if path in (COMPLETIONS, CHAT):
            options = {"include_usage": True, "continuous_usage_stats": True}
            check(document, "post", path, server.post(path, {**plain, "stream": True, "stream_options": options}))


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_what_is_refused_is_not_described(
    server: Running, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not jsonschema.Draft202012Validator({**schema, "components": document["components"]}).is_valid(body)
    assert server.post(path, body).status_code == 400


def test_calls_and_their_results_are_described(server: Running, document: dict[str, Any]) -> None:
    body = {"messages": [*HI, *DESCRIBED, *HI], "max_tokens": 2, "tools": [TOOL], "tool_choice": "none"}
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)
    assert server.post(CHAT, body).status_code == 200


def test_answers_without_bodies(server: Running, document: dict[str, Any]) -> None:
    id = server.post("/v1/responses", {"input": ITEMS}).json()["id"]
    for method, path in OPERATIONS:
        if method != "get":
            continue
        known = MODEL if "models" in path else id
        for name in (known, "nope") if "{id}" in path else (known,):
            check(document, method, path, server.client.get(path.replace("{id}", name)))
    items = "/v1/responses/{id}/input_items"
    check(document, "get", items, server.client.get(items.replace("{id}", id), params={"limit": "x"}))
    for method, path in (("post", "/v1/responses/{id}/cancel"), *([("delete", "/v1/responses/{id}")] * 2)):
        check(document, method, path, server.client.request(method, path.replace("{id}", id)))


def test_a_limit_is_described_wherever_it_counts(smol: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "a", "requests_per_minute": 1}]}))
    with running(smol, api_keys_file=file) as server:
        key = {"x-api-key": "a"}
        whole = server.client.get("/openapi.json", headers=key).json()
        assert server.client.post("/detokenize", json={"tokens": [5]}, headers=key).status_code == 200
        for method, path in OPERATIONS:
            if method == "post":
                reply = server.client.post(path.replace("{id}", "x"), json={}, headers=key)
                assert reply.status_code == 429
                check(whole, method, path, reply)


def test_the_page_needs_nothing_from_elsewhere(server: Running, document: dict[str, Any]) -> None:
    reply = server.client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.search(r"<script|src=|https?://", reply.text)
    for path in document["paths"]:
        assert path in reply.text
    assert "`" not in reply.text
    links = set(re.findall(r"href='#(\w+)'", reply.text))
    assert links <= set(re.findall(r"<details id=(\w+)>", reply.text))
