from __future__ import annotations

import json
from typing import Any

import pytest

from server.errors import RequestError
from server.parsing.detect import AnswerFormats
from server.parsing.forcing import forced
from server.parsing.formats import HERMES
from server.parsing.reasoning import REASONING_FORMATS
from server.structured.structure import Structure, serialise
from server.tools import Tool, ToolUse

F, STRICT = Tool("f"), Tool("s", parameters={"type": "object"}, strict=True)
LARK = Tool("l", custom=True, syntax="lark", definition='start: "a"+')
REGEX = Tool("r", custom=True, syntax="regex", definition="a+/b")
TEXT = Tool("t", custom=True)
FORMATS = AnswerFormats(HERMES, REASONING_FORMATS["think"], native=True)
FORM = Structure("json", '{"type": "object"}', "response_format")
RAW = Structure("choice", '["a", "b"]', "structured_outputs")


def use(*tools: Tool, choice: Any = "required") -> ToolUse:
    return ToolUse(tools, choice, frozenset(tool.name for tool in tools))


def lark(structure: Structure | None) -> str:
    assert structure is not None
    assert structure.kind == "lark"
    serialise(structure)
    return structure.source


def test_nothing_to_force() -> None:
    assert forced(FORMATS, ToolUse()) is None
    assert forced(FORMATS, use(F, choice="auto")) is None
    assert forced(FORMATS, use(STRICT, choice="none")) is None
    assert forced(FORMATS, use(TEXT)) is None


def test_forms_alone_stay_as_they_are() -> None:
    for use_ in (ToolUse(), use(F, choice="none")):
        assert forced(FORMATS, use_, FORM) is FORM
        assert forced(FORMATS, use_, RAW) is RAW
    assert forced(FORMATS, use(F, STRICT, choice="auto"), RAW) is RAW


def test_forms_behind_reasoning() -> None:
    assert "</think>" in lark(forced(FORMATS, ToolUse(), FORM, inside=True))
    assert "<think>" in lark(forced(FORMATS, ToolUse(), FORM, thinks=True))
    regex = Structure("regex", r"a/b\/c", "structured_outputs")
    assert r"/a\/b\/c/" in lark(forced(FORMATS, ToolUse(), regex, thinks=True))
    for structure in (RAW, Structure("json_object", "", "response_format")):
        lark(forced(FORMATS, ToolUse(), structure, inside=True))
    with pytest.raises(RequestError, match="behind reasoning"):
        forced(FORMATS, ToolUse(), Structure("grammar", "x", "structured_outputs"), inside=True)


def test_calls() -> None:
    assert '"f\\"' in lark(forced(FORMATS, use(F)))
    assert "</think>" in lark(forced(FORMATS, use(F), inside=True))
    assert "free_calls" in lark(forced(FORMATS, use(F, STRICT, choice="auto")))
    assert "answer" in lark(forced(FORMATS, use(F, choice="auto"), FORM))
    assert "answer" not in lark(forced(FORMATS, use(F), FORM))


def test_the_input_of_a_custom_tool() -> None:
    assert forced(FORMATS, use(REGEX)) == Structure("regex", "a+/b", "tools")
    assert forced(FORMATS, use(LARK)) == Structure("lark", LARK.definition, "tools")
    assert json.dumps("a+/b")[1:-1] in lark(forced(FORMATS, use(REGEX, F)))


@pytest.mark.parametrize(
    ("formats", "tools", "fields", "param"),
    [
        (AnswerFormats(None), use(F), {}, "tool_choice"),
        (FORMATS, use(F, LARK), {}, "tool_choice"),
        (FORMATS, use(F), {"structure": RAW}, "structured_outputs"),
        (FORMATS, use(F, choice="auto"), {"structure": Structure("lark", "x", "response_format")}, "response_format"),
        (FORMATS, use(LARK), {"inside": True}, "tools"),
    ],
)
def test_refused(formats: AnswerFormats, tools: ToolUse, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        forced(formats, tools, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
