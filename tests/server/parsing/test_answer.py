"""What an answer's text becomes, whole and in whatever pieces."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsing.answer import AnswerFormat, AnswerParser
from server.parsing.formats import MISTRAL_NAMED, TOOL_FORMATS, ToolFormat
from server.parsing.reasoning import REASONING_FORMATS
from server.pieces import CallArguments, CallStart, Content, Piece, Reasoning, joined

NAMES = frozenset({"now", "get_weather", "shell"})
THINK = REASONING_FORMATS["think"]
FORMATS = {**TOOL_FORMATS, "mistral_named": MISTRAL_NAMED}


def parsed(text: str, format: AnswerFormat, cuts: list[int] | None = None) -> tuple[list[Piece], str]:
    """Pieces, neighbours joined, and the finish reason of a text that stopped."""
    ids = map("call_{}".format, itertools.count())
    parser = AnswerParser(format, lambda: next(ids))
    pieces: list[Piece] = []
    bounds = sorted({0, len(text), *(cuts or ())})
    for start, end in itertools.pairwise(bounds):
        pieces += parser.feed(text[start:end])
    return joined(pieces + parser.finish()), parser.finish_reason("stop")


def tools(name: str, **fields: Any) -> AnswerFormat:
    return AnswerFormat(FORMATS[name], NAMES, frozenset({"shell"}), **fields)


def calls(*expected: tuple[str, str]) -> list[Piece]:
    pieces: list[Piece] = []
    for index, (name, arguments) in enumerate(expected):
        pieces += [CallStart(index, f"call_{index}", name), CallArguments(index, arguments)]
    return pieces


PARIS = ("get_weather", '{"city":  "Par\\"i}s", "x": {"y": [1, {}]}}')
NOTHING = ("now", "{}")
ONE = ("now", '{"a": 1}')
CALLS: list[tuple[str, str, list[Piece]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS[1]}}}\n</tool_call>\n',
        calls(NOTHING, PARIS),
    ),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>', calls(NOTHING)),
    ("hermes", '<tool_call>{"arguments": {"a": [1, "]"]}, "i": [2], "name": "now"}', calls(("now", '{"a": [1, "]"]}'))),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', calls(ONE)),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls(NOTHING)),
    ("hermes", 'Let me see.\n\n<tool_call>{"name": "now"}</tool_call>', [Content("Let me see."), *calls(NOTHING)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\nDone. ', [*calls(NOTHING), Content("\nDone. ")]),
    ("hermes", '<<tool_call>{"name": "now"}', [Content("<"), *calls(NOTHING)]),
    (
        "llama3_json",
        '{"name": "now", "parameters": {"a": 1}}; '
        f'{{"type": "function", "name": "get_weather", "parameters": {PARIS[1]}}}',
        calls(ONE, PARIS),
    ),
    ("llama3_json", ' \n<|python_tag|>{"name": "now", "parameters": {}}', calls(NOTHING)),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS[1]}, "id": "abc"}}, {{"name": "now"}}]',
        calls(PARIS, NOTHING),
    ),
    ("mistral", f'[TOOL_CALLS]get_weather{PARIS[1]}[TOOL_CALLS]now[CALL_ID]b1[ARGS]{{"a": 1}}', calls(PARIS, ONE)),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS[1]}}}, {{"name": "now"}}]',
        calls(PARIS, NOTHING),
    ),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', calls(NOTHING)),
    (
        "pythonic",
        "[now(), get_weather(city='Pa)r\\'is', n=[1, -2.5, 1e3], d={\"a\": True, 'b': None}, t=(1, \"x\" 'y'))]",
        calls(
            NOTHING,
            (
                "get_weather",
                '{"city": "Pa)r\'is", "n": [1, -2.5, 1000.0], "d": {"a": true, "b": null}, "t": [1, "xy"]}',
            ),
        ),
    ),
    ("pythonic", '<|python_start|>[now(a="\\n\\u00e4", b=false)]', calls(("now", '{"a": "\\nä", "b": false}'))),
    ("pythonic", "<|python_start|>[now(a=1)]<|python_end|>", calls(ONE)),
]


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_calls(name: str, text: str, expected: list[Piece]) -> None:
    assert parsed(text, tools(name)) == (expected, "tool_calls")


NO_CALLS = [
    ("hermes", "It is sunny."),
    ("hermes", "  \n"),
    ("hermes", "a < b <tool_call"),
    ("hermes", '<tool_call>{"name": bad'),
    ("hermes", '\n<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {bad}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"city": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "no'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"x": ' + "[" * 5000 + "]" * 5000 + ', "name": "now"}'),
    ("hermes", '<tool_call>{"name": "shell", "arguments": {"input": 1}}</tool_call>'),
    ("llama3_json", '{"a": 1}'),
    ("llama3_json", 'See {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>print("x")'),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[1] and [TOOL"),
    ("granite", '<|tool_call|>{"name": 1}'),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[now(x)]"),
    ("pythonic", "[now(a=open('x'))]"),
    ("pythonic", "[now(a=1"),
    ("pythonic", "[now(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ("pythonic", '[now(a="\\ud83d")]'),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    assert parsed(text, tools(name)) == ([Content(text)], "stop")


CUT = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1, "b": {', '{"a": 1, "b": {', "stop"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\\', '{"a": "x\\', "stop"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}', '{"a": 1}', "tool_calls"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}, "id', '{"a": 1}', "tool_calls"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}}\n</tool', '{"a": 1}', "tool_calls"),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}, ', '{"a": 1}', "tool_calls"),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": [', '{"a": [', "stop"),
    ("llama3_json", '{"name": "now", "parameters": {"a": "b', '{"a": "b', "stop"),
]


@pytest.mark.parametrize(("name", "text", "arguments", "reason"), CUT)
def test_calls_that_are_cut(name: str, text: str, arguments: str, reason: str) -> None:
    """Arguments are as far as they came; only whole calls are a reason to call."""
    assert parsed(text, tools(name)) == (calls(("now", arguments)), reason)


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = AnswerParser(tools("hermes"))
    parser.feed('<tool_call>{"name": "now", "arguments": {"a": "')
    for char in "some long text}":
        assert parser.feed(char) == [CallArguments(0, char)]


def test_content_is_not_held_back() -> None:
    parser = AnswerParser(tools("hermes"))
    assert [parser.feed(text) for text in ("It", " is", " 1 <", " 2")] == [
        [Content("It")],
        [Content(" is")],
        [Content(" 1")],
        [Content(" < 2")],
    ]


def test_only_the_first_call_where_calls_are_not_parallel() -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call> x'
    assert parsed(text, tools("hermes", single=True)) == ([*calls(("now", "{}")), Content(" x")], "tool_calls")


def test_custom_tools_get_their_text() -> None:
    pair = json.dumps('a\n"\\ 😀 ä')
    text = f'<tool_call>{{"name": "shell", "arguments": {{"input": {pair}}}}}</tool_call>'
    assert parsed(text, tools("hermes")) == (calls(("shell", 'a\n"\\ 😀 ä')), "tool_calls")
    half = '<tool_call>{"name": "shell", "arguments": {"input": "x \\ud83d y \\ude00"}}</tool_call>'
    assert parsed(half, tools("hermes")) == (calls(("shell", "x \\ud83d y \\ude00")), "tool_calls")


def test_the_whole_answer_is_a_custom_tools_input() -> None:
    format = AnswerFormat(FORMATS["hermes"], NAMES, whole="shell", reasoning=THINK)
    assert parsed("<think>h</think>\nls -l", format) == ([Reasoning("h"), *calls(("shell", "ls -l"))], "tool_calls")
    assert parsed("", format) == ([CallStart(0, "call_0", "shell")], "tool_calls")
    assert parsed("<think>cut", format) == ([Reasoning("cut")], "stop")


REASONED = [
    ("<think>\n a b \n</think>\n\nanswer", False, [Reasoning("a b"), Content("answer")]),
    ("a b\n</think>\n\nanswer ", True, [Reasoning("a b"), Content("answer ")]),
    ("\n <think>a </thi</think>b<think>c</think>", False, [Reasoning("a </thi"), Content("b<think>c</think>")]),
    ("just an answer", False, [Content("just an answer")]),
    ("a</think>b", False, [Content("a</think>b")]),
    ("<think></think>x", False, [Content("x")]),
    ("<think>cut", False, [Reasoning("cut")]),
    ("cut </th", True, [Reasoning("cut </th")]),
    ("<thin", False, [Content("<thin")]),
    ("  ", False, [Content("  ")]),
    (" " * 100 + "<think>x", False, [Content(" " * 100 + "<think>x")]),
]


@pytest.mark.parametrize(("text", "inside", "expected"), REASONED)
def test_reasoning(text: str, inside: bool, expected: list[Piece]) -> None:
    format = AnswerFormat(reasoning=THINK, inside=inside)
    assert parsed(text, format)[0] == expected
    assert parsed(text, format, list(range(len(text))))[0] == expected


def test_calls_behind_reasoning_but_not_in_it() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    pieces, reason = parsed(f"<think>{call}</think>\n{call}", tools("hermes", reasoning=THINK))
    assert (pieces, reason) == ([Reasoning(call), *calls(("now", "{}"))], "tool_calls")
    assert parsed(f"<think>{call}", tools("hermes", reasoning=THINK)) == ([Reasoning(call)], "stop")


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|tool_call|>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<think>",
        "</think>",
    ),
    *(
        '{"name": "now", ',
        '"arguments": ',
        '{"a": "',
        '"}',
        "}",
        "{",
        "[",
        "]",
        ", ",
        "; ",
        '"',
        "\\",
        "\n",
        " ",
        "x",
        "<",
    ),
    *(
        '{"name": "now", "arguments": {}}',
        '{"name": "shell", "arguments": {"input": "\\ud83d\\ude00',
        "now(",
        "a=1",
        ")",
    ),
    *("now", "\\u00", "é😀"),
]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.sampled_from([text for _, text, _ in CALLS]),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_cutting_changes_nothing(
    name: str, text: str, cuts: list[int], reasons: bool, inside: bool, single: bool
) -> None:
    format = tools(name, reasoning=THINK if reasons else None, inside=inside and reasons, single=single)
    whole = parsed(text, format)
    assert parsed(text, format, [cut for cut in cuts if cut < len(text)]) == whole
    assert parsed(text, format, list(range(len(text)))) == whole


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_content_knows_its_place(name: str, text: str, cuts: list[int], inside: bool) -> None:
    """What is content is found in the text where the piece says."""
    parser = AnswerParser(tools(name, reasoning=THINK, inside=inside))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [piece for start, end in itertools.pairwise(bounds) for piece in parser.feed(text[start:end])]
    reach = 0
    for piece in [*pieces, *parser.finish()]:
        if isinstance(piece, Content):
            assert piece.start >= reach
            reach = piece.start + len(piece.text)
            assert text[piece.start : reach] == piece.text


@given(st.sampled_from(sorted(FORMATS)), st.text())
def test_text_without_markers_is_content(name: str, text: str) -> None:
    assert parsed(text, tools(name))[0] == ([Content(text)] if text else [])


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(
        st.dictionaries(
            st.from_regex(r"[a-z]{1,4}", fullmatch=True).filter(lambda key: key not in ("true", "false", "null")),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
                lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
                max_leaves=6,
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_every_call_comes_back(format: ToolFormat, arguments: list[dict[str, Any]]) -> None:
    """Written by the format's writer, read by its reader."""
    text = format.write([("now", entry) for entry in arguments])
    pieces, reason = parsed(text, AnswerFormat(format, NAMES))
    assert reason == "tool_calls"
    assert [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)] == arguments
    assert len(pieces) == 2 * len(arguments)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"x":"'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "'),
        ("hermes", '<tool_call>{"arguments": {"a": [['),
        ("hermes", " \n"),
        ("mistral", "[TOOL_CALLS]now"),
        ("mistral", "["),
        ("llama3_json", '{"name": "now"}; '),
        ("pythonic", "[now(a=("),
        ("pythonic", "[now(),"),
    ],
)
def test_time_is_linear(name: str, unit: str) -> None:
    """Per character it costs about the same, fed one by one, whether there are 20,000 or 320,000."""

    def seconds(size: int) -> float:
        parser = AnswerParser(tools(name, reasoning=THINK))
        text = (unit * (size // len(unit) + 1))[:size]
        start = time.thread_time()
        for char in text:
            parser.feed(char)
        parser.finish()
        return time.thread_time() - start

    small = min(seconds(20_000) for _ in range(3))
    large = (seconds(320_000) for _ in range(3))  # of these one may have met a busy machine
    assert any(it < 64 * small for it in large), "four times what linear would be"
