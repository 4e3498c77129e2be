from __future__ import annotations

import pytest

from server.parsing.answer import AnswerFormat
from server.parsing.detect import AnswerFormats, detect
from server.parsing.formats import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PYTHONIC, ToolFormat
from server.parsing.reasoning import REASONING_FORMATS
from server.tools import Tool, ToolUse

USE = ToolUse((Tool("f"), Tool("g", custom=True)), "auto", frozenset({"f", "g"}))


class Specials:
    """A tokenizer's special tokens."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(len(self._texts)))

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<|im_start|>' }}", HERMES, None),
        ("<tool_call> {{ tools }} <think> </think>", HERMES, "think"),
        ("{{ '[TOOL_CALLS] [' }} [AVAILABLE_TOOLS]", MISTRAL, None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }} [THINK]", MISTRAL_NAMED, "mistral"),
        ("write '<|tool_call|>' followed by a JSON list", GRANITE, None),
        ("{{ '<|python_tag|>' }}", LLAMA, None),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA, None),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", PYTHONIC, None),
        ("Here is my thought process: Here is my response:", HERMES, "granite"),
    ],
)
def test_found_in_the_template(template: str, tools: ToolFormat, reasoning: str | None) -> None:
    formats = detect(template, Specials())
    assert formats.tools is tools
    assert formats.reasoning == (None if reasoning is None else REASONING_FORMATS[reasoning])
    assert formats.native == (reasoning is not None)


def test_told_by_flags() -> None:
    formats = detect("<tool_call>", Specials(), "mistral", "think")
    assert (formats.tools, formats.reasoning, formats.native) == (MISTRAL, REASONING_FORMATS["think"], False)
    formats = detect("<tool_call> <think>", Specials(), "none", "none")
    assert (formats.tools, formats.reasoning) == (None, None)
    assert formats.answer(USE).plain


def test_markers_that_are_special_tokens() -> None:
    """They are shown where they are needed, and only there."""
    formats = detect("[TOOL_CALLS] [ARGS] [THINK]", Specials("<s>", "[TOOL_CALLS]", "[THINK]", "[/THINK]", "[ARGS]"))
    assert formats.special == {"[TOOL_CALLS]": 1, "[THINK]": 2, "[/THINK]": 3, "[ARGS]": 4}
    assert formats.shown(formats.answer(USE)) == {1, 2, 3, 4}
    assert formats.shown(formats.answer(ToolUse())) == {2, 3}


def test_an_answers_format() -> None:
    formats = AnswerFormats(HERMES, REASONING_FORMATS["think"])
    assert formats.answer(USE, split=False, inside=True) == AnswerFormat(
        HERMES, frozenset({"f", "g"}), frozenset({"g"}), inside=True
    )
    named = ToolUse(USE.tools, "required", frozenset({"g"}), parallel=False)
    assert formats.answer(named).whole == "g"
    assert formats.answer(ToolUse(USE.tools, "none", USE.allowed)).tools is None


def test_where_a_prompt_leaves_the_model() -> None:
    formats = detect("<think>", Specials())
    assert formats.inside("assistant\n<think>\n")
    assert not formats.inside("user\n<think>\nassistant\n")
    assert formats.inside("any", continued="<think>well")
    assert not formats.inside("<think>", continued="<think>well</think>so")
    assert formats.thinks("assistant\n")
    assert not formats.thinks("assistant\n<think>\n\n</think>\n\n")
    assert not detect("", Specials(), reasoning="think").thinks("assistant\n")
