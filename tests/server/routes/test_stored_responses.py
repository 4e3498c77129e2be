"""Responses that are asked for again, and the SDK that does so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseItem
from openai.types.responses.response_item_list import ResponseItemList

from model.tokenizer import Tokenizer
from tests.server.routes.test_responses import CALL, RESPONSES, WEATHER, respond, say, stream
from tests.server.running import MODEL, Running, running


def test_going_on_from_a_stored_response(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Hello Ann.")
    first = respond(server, "I am Ann.", instructions="Be brief.")
    second = respond(server, "Who am I?", previous_response_id=first["id"])
    prompt = smol.decode(server.engine.submits()[-1].prompt_ids, skip_special=False)
    assert prompt.index("I am Ann.") < prompt.index("Hello Ann.") < prompt.index("Who am I?")
    assert "Be brief." not in prompt, "instructions are not inherited"
    assert second["previous_response_id"] == first["id"]
    respond(server, "And now?", previous_response_id=second["id"])
    assert smol.decode(server.engine.submits()[-1].prompt_ids).count("Hello Ann.") == 2
    respond(server, [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "So?"}])
    assert "Hello Ann." in smol.decode(server.engine.submits()[-1].prompt_ids)


def test_bounds_of_a_conversation(server: Running, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    say(server, smol, "Yes.")
    first = respond(server, "a")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert respond(server, [reference] * 129, status=400)["error"]["param"] == "input"
    monkeypatch.setattr("server.routes.responses.MAX_ITEMS", 4)
    second = respond(server, "b", previous_response_id=first["id"])
    error = respond(server, "c", previous_response_id=second["id"], status=400)["error"]
    assert (error["param"], "4 items" in error["message"]) == ("previous_response_id", True)


def test_the_store(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Yes.")
    body = respond(
        server,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    )
    at = f"{RESPONSES}/{body['id']}"
    assert server.client.get(at).json() == body
    items = server.client.get(f"{at}/input_items", params={"order": "asc", "limit": 2}).json()
    ResponseItemList.model_validate(items, strict=True)
    assert [item["content"][0]["text"] for item in items["data"]] == ["a", "b"]
    assert items["has_more"]
    rest = server.client.get(f"{at}/input_items", params={"order": "asc", "after": items["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["c"]
    assert not rest["has_more"]
    assert [i["content"][0]["text"] for i in server.client.get(f"{at}/input_items").json()["data"]] == ["c", "b", "a"]
    for query in ({"order": "up"}, {"limit": "0"}, {"limit": "x"}, {"after": "msg_no"}):
        assert server.client.get(f"{at}/input_items", params=query).status_code == 400
    assert server.client.get(at, params={"stream": "true"}).status_code == 400
    assert server.client.post(f"{at}/cancel").status_code == 400
    assert server.client.delete(at).json() == {"id": body["id"], "object": "response", "deleted": True}
    for reply in (server.client.get(at), server.client.delete(at), server.client.get(f"{at}/input_items")):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "response_not_found"
    assert respond(server, previous_response_id=body["id"], status=404)["error"]["param"] == "previous_response_id"


def test_what_is_not_to_be_stored(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Yes.")
    body = respond(server, store=False)
    assert body["store"] is False
    assert server.client.get(f"{RESPONSES}/{body['id']}").status_code == 404
    final = stream(server, store=False)[-1]["response"]
    assert server.client.get(f"{RESPONSES}/{final['id']}").status_code == 404
    final = stream(server)[-1]["response"]
    assert server.client.get(f"{RESPONSES}/{final['id']}").json() == final


def test_keys_see_only_their_own(smol: Tokenizer) -> None:
    with running(smol, api_key=["one", "two"]) as server:
        say(server, smol, "Yes.")
        mine = server.post(RESPONSES, {"input": "hi"}, authorization="Bearer one").json()
        at = f"{RESPONSES}/{mine['id']}"
        assert server.client.get(at, headers={"authorization": "Bearer one"}).status_code == 200
        for method, path in (("GET", at), ("DELETE", at), ("GET", f"{at}/input_items"), ("POST", f"{at}/cancel")):
            assert server.client.request(method, path, headers={"authorization": "Bearer two"}).status_code == 404
        theirs = {"input": "hi", "previous_response_id": mine["id"]}
        assert server.post(RESPONSES, theirs, authorization="Bearer two").status_code == 404
        reference = {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]}
        assert server.post(RESPONSES, reference, authorization="Bearer two").status_code == 404
        assert server.client.get(at, headers={"authorization": "Bearer one"}).status_code == 200


def test_input_items_are_what_the_sdk_says(strict: Running, smol: Tokenizer) -> None:
    """Of every kind, and sent back they are taken, by a server that refuses unknown fields too."""
    say(strict, smol, "Yes.")
    message = {"role": "user", "content": "hi"}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"}
    outputs = [{"type": f"{of['type']}_output", "call_id": of["call_id"], "output": "y"} for of in (call, custom)]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    given = [message, thought, call, custom, *outputs, {"role": "assistant", "content": "z"}, message]
    first = respond(strict, given)
    items = strict.client.get(f"{RESPONSES}/{first['id']}/input_items?order=asc").json()["data"]
    for item in items:
        pydantic.TypeAdapter(ResponseItem).validate_python(item, strict=True)
    assert respond(strict, items)["usage"]["input_tokens"] == first["usage"]["input_tokens"]
    assert respond(strict, "so?", previous_response_id=first["id"])["status"] == "completed"


@pytest.fixture
def strict(smol: Tokenizer) -> Iterator[Running]:
    with running(smol, strict_fields=True) as server:
        yield server


def test_the_sdk(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Good day.")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model=MODEL, input="hi")
        assert whole.output_text == "Good day."
        assert client.responses.retrieve(whole.id).output_text == "Good day."
        assert len(list(client.responses.input_items.list(whole.id))) == 1
        with client.responses.stream(model=MODEL, input="hi", previous_response_id=whole.id) as events:
            kinds = [event.type for event in events]
            assert events.get_final_response().output_text == "Good day."
        assert kinds[-1] == "response.completed"
        assert client.responses.input_tokens.count(model=MODEL, input="hi").input_tokens > 0
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        say(server, smol, CALL)
        tools: Any = [WEATHER]
        with client.responses.stream(model=MODEL, input="hi", tools=tools) as events:
            (call,) = events.get_final_response().output
        assert call.type == "function_call"
        assert call.parsed_arguments == {"city": "Rome"}


def test_the_sdk_asynchronously(server: Running, smol: Tokenizer) -> None:
    say(server, smol, "Good day.")

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model=MODEL, input="hi", stream=True)
            assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == "Good day."
            async with client.responses.stream(model=MODEL, input="hi") as events:
                assert (await events.get_final_response()).output_text == "Good day."

    asyncio.run(talk())
