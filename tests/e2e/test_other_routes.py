"""Responses and Anthropic's messages on the demo model: what is streamed is what is not, and a conversation goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from tests.e2e.daemon import MODEL, Daemon

SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}


def test_responses(daemon: Daemon) -> None:
    question = "What is the capital of France?"
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=40)
        assert "Paris" in whole.output_text
        with client.responses.stream(model=MODEL, input=question, temperature=0, max_output_tokens=40) as events:
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            final = events.get_final_response()
        assert "".join(deltas) == final.output_text == whole.output_text
        assert final.usage is not None
        later = client.responses.create(
            model=MODEL, input="And of Italy?", previous_response_id=whole.id, temperature=0, max_output_tokens=40
        )
        assert later.usage is not None
        assert later.usage.input_tokens > final.usage.input_tokens
        form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
        shaped = client.responses.create(model=MODEL, input=question, text=form, temperature=0, max_output_tokens=60)
        assert set(json.loads(shaped.output_text)) == {"capital"}
    daemon.wait(daemon.at_rest, 1, "blocks freed")


def test_messages(daemon: Daemon) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 40,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        whole = client.post("/v1/messages", json=body).json()
        lines = client.post("/v1/messages", json={**body, "stream": True}).text.splitlines()
        forced = client.post("/v1/messages", json={**body, **tools()}).json()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert "Paris" in whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    (call,) = forced["content"]
    assert (call["type"], call["name"], set(call["input"])) == ("tool_use", "answer", {"capital"})
    assert forced["stop_reason"] == "tool_use"
    daemon.wait(daemon.at_rest, 1, "blocks freed")


def tools() -> dict[str, Any]:
    """A tool that has to be called."""
    choice = {"type": "tool", "name": "answer", "disable_parallel_tool_use": True}
    return {"tools": [{"name": "answer", "input_schema": SCHEMA}], "tool_choice": choice, "max_tokens": 80}
