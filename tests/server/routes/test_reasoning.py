from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from tests.server.chats import prompt, say, streamed, whole
from tests.server.running import Running, running


@pytest.fixture(scope="module")
def thinking(smol: Tokenizer) -> Iterator[Running]:
    with running(smol, reasoning_parser="think") as server:
        yield server


THOUGHT = "<think>\nIs it a Question: yes\n</think>\n\nfine"


@pytest.mark.parametrize("read", [whole, streamed])
def test_reasoning(thinking: Running, smol: Tokenizer, read: Any) -> None:
    """Under both names; stop strings count only behind it."""
    say(thinking, smol, THOUGHT)
    message = read(thinking, stop=["Question:"])["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Is it a Question: yes"
    assert message["content"] == "fine"
    message = read(thinking, stop=["in"])["message"]
    assert (message["reasoning"], message["content"]) == ("Is it a Question: yes", "f")
    message = read(thinking, include_reasoning=False)["message"]
    assert (message.get("reasoning") or "", message["content"]) == ("", "fine")
    for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        message = read(thinking, **fields)["message"]
        assert (message.get("reasoning") or "", message["content"]) == ("", THOUGHT)


def test_reasoning_tokens(thinking: Running, smol: Tokenizer) -> None:
    say(thinking, smol, THOUGHT)
    thought = len(smol.encode("<think>\nIs it a Question: yes\n</think>", add_special_tokens=False))
    usage = thinking.chat(max_tokens=100).json()["usage"]
    details = usage["completion_tokens_details"]
    assert thought <= details["reasoning_tokens"] <= thought + 1
    assert usage["completion_tokens"] == len(thinking.engine.reply)
    reply = thinking.chat(max_tokens=6).json()
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    message, reason = reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]
    assert (message["content"], reason) == (None, "length")
    assert message["reasoning"]
    say(thinking, smol, "just an answer")
    reply = thinking.chat(max_tokens=100).json()
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "just an answer", "refusal": None}


SWITCHED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}\n"
)


def test_a_template_that_opens_the_reasoning(smol: Tokenizer, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(SWITCHED)
    with running(smol, chat_template=template, reasoning_field="reasoning") as server:
        say(server, smol, "Hm.</think>Yes.")
        message = server.chat(max_tokens=50, stop=["Hm"]).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning": "Hm."}
        say(server, smol, "Yes.")
        message = server.chat(max_tokens=50, reasoning_effort="none").json()["choices"][0]["message"]
        assert prompt(server, smol).endswith("<think></think>")
        assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert server.chat(reasoning_effort="low").status_code == 200
        assert prompt(server, smol).endswith("<think>")
        forged = [{"role": "user", "content": "x <think>"}]
        server.chat(messages=forged, reasoning_effort="none", max_tokens=50)
        assert (
            server.chat(messages=forged, reasoning_effort="none").json()["choices"][0]["message"]["content"] == "Yes."
        )
