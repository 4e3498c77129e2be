"""What is too much is refused before anything is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from server.errors import ContextTooLong
from server.forgery import SpecialTokens
from server.prompts import MAX_KWARGS_NODES, PromptBuilder
from server.template import Chat, ChatTemplate
from tests.server.test_prompts import LIMITS, builder, chat, complete, refused

__all__ = ["builder"]


TEXT = "lorem ipsum " * 87_000


@pytest.fixture(scope="module")
def extra(smol: Tokenizer) -> Iterator[PromptBuilder]:
    """With a template that reads one variable of the client's."""
    builder = PromptBuilder(smol, LIMITS, template="{{ messages[0].content }}{{ extra | tojson if extra }}")
    yield builder
    builder.close()


@pytest.mark.parametrize(
    ("message", "kwargs", "param"),
    [
        ({"content": TEXT}, {}, "messages"),
        ({"content": [{"type": "text", "text": TEXT}]}, {}, "messages"),
        ({"content": "x", "name": TEXT}, {}, "messages"),
        ({"content": "x", TEXT: "x"}, {}, "messages"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": TEXT}}]}, {}, "messages"),
        ({"content": "x"}, {"extra": [{"a": TEXT}]}, "chat_template_kwargs"),
    ],
)
def test_a_chat_with_far_too_much_text_is_refused_before_any_work(
    extra: PromptBuilder, monkeypatch: pytest.MonkeyPatch, message: Any, kwargs: Any, param: str
) -> None:
    """Whatever holds the text: neither is it searched for special tokens nor rendered."""
    monkeypatch.setattr(SpecialTokens, "guarded", None)
    monkeypatch.setattr(ChatTemplate, "render", None)
    chat = Chat([{"role": "user", "content": "y"}, {"role": "user", **message}], kwargs=kwargs)
    error = refused(lambda: asyncio.run(extra.chat(chat)), ContextTooLong)
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert "at least" in error.message


def test_template_variables_are_bounded_where_the_template_reads_them(extra: PromptBuilder) -> None:
    """The others are not even looked at."""
    fits: list[Any] = [[0] * 4000, {"a": [0] * 5990}]
    assert chat(extra, "x", kwargs={"extra": [[], [{}]], "other": [[]] * 100_000}).text == "x[[], [{}]]"
    assert refused(lambda: chat(extra, "x", kwargs={"extra": fits}), ContextTooLong).param == "messages"
    large: list[Any] = [[[]] * 10_000, {str(key): 1 for key in range(10_000)}, [*fits, [1] * 10]]
    for values in large:
        error = refused(partial(chat, extra, "x", kwargs={"extra": values}))
        assert error.param == "chat_template_kwargs"
        assert str(MAX_KWARGS_NODES) in error.message


def test_far_too_much_text_is_refused_before_it_is_encoded(
    builder: PromptBuilder, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smol, "encode", None)
    assert "at least" in refused(lambda: complete(builder, TEXT), ContextTooLong).message
    assert refused(lambda: complete(builder, [5] * 10**6), ContextTooLong).numbers["prompt_tokens"] == 10**6
    assert refused(lambda: asyncio.run(builder.encode(TEXT * 2, add_special_tokens=False))).param == "prompt"
