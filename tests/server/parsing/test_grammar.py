"""What grammars of calls let a model write, by llguidance itself."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.parsing.answer import AnswerFormat, AnswerParser
from server.parsing.formats import MISTRAL_NAMED, TOOL_FORMATS, ToolFormat
from server.parsing.grammar import reasoned, tool_grammar
from server.parsing.reasoning import REASONING_FORMATS
from server.pieces import CallArguments, CallStart
from server.tools import Tool, ToolUse

THINK = REASONING_FORMATS["think"]
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    strict=True,
)
NOW = Tool("now")
SHELL = Tool("shell", custom=True, syntax="regex", definition="ls( -l)?")
FORMATS = [*TOOL_FORMATS.values(), MISTRAL_NAMED]
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.name}-{format.named}")


@pytest.fixture(scope="module")
def bytewise() -> LLTokenizer:
    return LLTokenizer("byte")


def fits(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a model could write this text and end."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def use(*tools: Tool, choice: Any = "required", parallel: bool = True) -> ToolUse:
    return ToolUse(tools, choice, frozenset(tool.name for tool in tools), parallel)


@every_format
def test_required_calls(bytewise: LLTokenizer, format: ToolFormat) -> None:
    grammar = tool_grammar(format, use(WEATHER, NOW), special={})
    assert fits(bytewise, grammar, format.write([("get_weather", {"city": "Paris"})]))
    assert fits(bytewise, grammar, format.write([("now", {}), ("get_weather", {"city": "Rome", "days": 3})]))
    for wrong in (
        "It is sunny.",
        "",
        format.write([("other", {})]),
        format.write([("get_weather", {})]),
        format.write([("get_weather", {"city": "Oslo"})]),
        format.write([("now", {"x": 1})]),
        "x" + format.write([("now", {})]),
        format.write([("now", {})]) + "x",
    ):
        assert not fits(bytewise, grammar, wrong), wrong


@every_format
def test_one_call_where_calls_are_not_parallel(bytewise: LLTokenizer, format: ToolFormat) -> None:
    grammar = tool_grammar(format, use(NOW, parallel=False), special={})
    assert fits(bytewise, grammar, format.write([("now", {})]))
    assert not fits(bytewise, grammar, format.write([("now", {}), ("now", {})]))


@every_format
def test_what_is_forced_is_read(bytewise: LLTokenizer, format: ToolFormat) -> None:
    """The writer, the grammar and the reader agree."""
    arguments = {"city": "Rome", "days": 2}
    text = format.write([("get_weather", arguments), ("now", {})])
    assert fits(bytewise, tool_grammar(format, use(WEATHER, NOW), special={}), text)
    numbers = itertools.count()
    names = frozenset({"get_weather", "now"})
    parser = AnswerParser(AnswerFormat(format, names), lambda: f"call_{next(numbers)}")
    first, given, second, nothing = parser.feed(text) + parser.finish()
    assert (first, second) == (CallStart(0, "call_0", "get_weather"), CallStart(1, "call_1", "now"))
    assert isinstance(given, CallArguments)
    assert json.loads(given.text) == arguments
    assert nothing == CallArguments(1, "{}")
    assert parser.finish_reason("stop") == "tool_calls"


@every_format
def test_auto_with_strict_tools(bytewise: LLTokenizer, format: ToolFormat) -> None:
    grammar = tool_grammar(format, use(WEATHER, choice="auto"), special={})
    call = format.write([("get_weather", {"city": "Paris"})])
    assert fits(bytewise, grammar, "It is sunny, isn't it?")
    assert fits(bytewise, grammar, "")
    assert fits(bytewise, grammar, call)
    assert not fits(bytewise, grammar, format.write([("get_weather", {"city": "Oslo"})]))
    if format.before:
        assert fits(bytewise, grammar, f"Let me see. {call} So.")
        assert not fits(bytewise, grammar, f"Let me see. {call.replace('Paris', 'Oslo')} So.")


@every_format
def test_a_form_beside_tools(bytewise: LLTokenizer, format: ToolFormat) -> None:
    """An answer has the form, or it calls."""
    answer = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar = tool_grammar(format, use(NOW, choice="auto"), special={}, answer=answer)
    assert fits(bytewise, grammar, '{"a": 1}')
    assert fits(bytewise, grammar, format.write([("now", {})]))
    assert not fits(bytewise, grammar, "It is sunny.")


@every_format
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_comes_first(bytewise: LLTokenizer, format: ToolFormat, inside: bool) -> None:
    grammar = tool_grammar(format, use(NOW), special={}, reasoning=THINK, inside=inside)
    call = format.write([("now", {})])
    assert fits(bytewise, grammar, f"{'' if inside else '<think>'}\nI <wonder>\n</think>\n\n{call}")
    assert fits(bytewise, grammar, call) == (not inside)
    assert not fits(bytewise, grammar, f"{'' if inside else '<think>'}I wonder</think>It is noon.")


def test_an_answer_behind_reasoning(bytewise: LLTokenizer) -> None:
    grammar = reasoned('%json {"type": "integer"}', {}, THINK, inside=True)
    assert fits(bytewise, grammar, "well, 4 I guess</think>\n5")
    assert not fits(bytewise, grammar, "well, 4 I guess</think>\nfive")


@every_format
def test_custom_tools_take_a_text(bytewise: LLTokenizer, format: ToolFormat) -> None:
    grammar = tool_grammar(format, use(SHELL), special={})
    text = format.write([("shell", {"input": "ls -l"})])
    assert fits(bytewise, grammar, text)
    assert not fits(bytewise, grammar, format.write([("shell", {"input": "rm"})]))
    parser = AnswerParser(AnswerFormat(format, frozenset({"shell"}), frozenset({"shell"})))
    pieces = parser.feed(text) + parser.finish()
    assert pieces[1:] == [CallArguments(0, "ls -l")]


def test_optional_arguments_in_python(bytewise: LLTokenizer) -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    for required in itertools.chain.from_iterable(itertools.combinations("abc", size) for size in range(4)):
        tool = Tool("f", parameters={"type": "object", "properties": properties, "required": list(required)})
        grammar = tool_grammar(TOOL_FORMATS["pythonic"], use(tool), special={})
        for given in itertools.chain.from_iterable(itertools.combinations("abc", size) for size in range(4)):
            text = f"[f({', '.join(f'{name}=1' for name in given)})]"
            assert fits(bytewise, grammar, text) == (set(required) <= set(given)), (required, given)


def test_schemas_that_are_not_strict_are_lenient(bytewise: LLTokenizer) -> None:
    """What can't be enforced is left out, unless the tool is strict."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "y"}}}}
    loose = tool_grammar(TOOL_FORMATS["hermes"], use(Tool("f", parameters=schema)), special={})
    assert fits(bytewise, loose, TOOL_FORMATS["hermes"].write([("f", {"a": "x"})]))
    strict = tool_grammar(TOOL_FORMATS["hermes"], use(Tool("f", parameters=schema, strict=True)), special={})
    matcher = LLMatcher(bytewise, LLMatcher.grammar_from_lark(strict))
    assert matcher.is_error()


def test_markers_that_are_special_tokens_are_written_by_id() -> None:
    grammar = tool_grammar(TOOL_FORMATS["mistral"], use(NOW), special={"[TOOL_CALLS]": 5})
    assert "<[5]>" in grammar
    assert '"[TOOL_CALLS]"' not in grammar
    grammar = tool_grammar(
        TOOL_FORMATS["mistral"],
        use(NOW, choice="auto"),
        special={"[TOOL_CALLS]": 5, "[/THINK]": 7, "[THINK]": 6},
        reasoning=REASONING_FORMATS["mistral"],
    )
    assert all(id in grammar for id in ("<[5]>", "<[6]>", "<[7]>"))
