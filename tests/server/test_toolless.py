from __future__ import annotations

import json
from typing import Any

from model.config_fields import MAX_DEPTH
from server.history import normalized
from server.parsing.formats import HERMES, MISTRAL
from server.template import Chat
from server.toolless import described
from server.tools import Tool, ToolUse

TOOLS = ToolUse((Tool("f", "does it"),), "auto", frozenset({"f"})).shown()


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_the_system_message_says_it() -> None:
    (system, user) = described(Chat([{"role": "user", "content": "hi"}], TOOLS), HERMES).messages
    assert system["role"] == "system"
    assert '"name": "f", "description": "does it"' in system["content"]
    assert '<tool_call>\n{"name": "function_name"' in system["content"]
    assert user == {"role": "user", "content": "hi"}
    chat = described(Chat([{"role": "developer", "content": "Be brief."}], TOOLS), MISTRAL)
    assert chat.messages[0]["content"].startswith("Be brief.\n\nYou can")
    assert "[TOOL_CALLS][{" in chat.messages[0]["content"]
    assert chat.tools is None


def test_earlier_calls_become_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call('{"a": 1}'), call("{bad")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call("")]},
        {"role": "tool", "tool_call_id": "call_3", "content": ""},
    ]
    plain = [dict(message) for message in messages]
    said = described(Chat(messages), HERMES).messages
    assert messages == plain, "the client's messages are left alone"
    assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant", "user"]
    assert said[1]["content"] == (
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"arguments": "{bad"}}\n</tool_call>'
    )
    assert said[2]["content"].count("<tool_response>") == 2
    assert said[3]["content"] == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_arguments_that_are_nested_too_deeply_stay_a_text() -> None:
    """There are depths that Python reads, and does not write."""
    for levels in (MAX_DEPTH + 1, *range(900, 1000)):
        text = '{"a":' * levels + "1" + "}" * levels
        (said,) = described(Chat([{"role": "assistant", "tool_calls": [call(text)]}]), HERMES).messages
        assert json.dumps({"arguments": text}) in said["content"]


def test_messages_as_templates_expect_them() -> None:
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    messages = normalized(
        [
            {"role": "assistant", "tool_calls": [custom], "reasoning": "hm"},
            {"role": "assistant", "content": "a", "tool_calls": []},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "x"},
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "content": "Yes.", "refusal": "No."},
        ]
    )
    (made,) = messages[0]["tool_calls"]
    assert made["function"] == {"name": "sh", "arguments": '{"input": "ls"}'}
    assert messages[0]["reasoning_content"] == "hm"
    assert "tool_calls" not in messages[1]
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
    assert messages[3]["role"] == "tool"
    assert messages[4:] == [{"role": "assistant", "content": text} for text in ("No.", "Yes.")]
