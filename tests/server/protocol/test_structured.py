"""Every name under which a structure is asked for comes to one Structure, and every fault names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.body import validate
from server.errors import RequestError
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.structured import StructureFields
from server.structured.structure import WHITESPACE, Kind, Structure

SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer"}, "a": {}}}
TAG = {"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]}
JSON = '{"type":"object","properties":{"ü":{"type":"integer"},"a":{}}}'


def structure(fields: dict[str, Any]) -> Structure | None:
    body = validate(CompletionRequest, {"prompt": "x", **fields})
    chat = validate(ChatRequest, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert isinstance(body, StructureFields)
    assert body.structure == chat.structure
    return body.structure


ASKED: list[tuple[dict[str, Any], Kind, str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a-B_9", "schema": SCHEMA, "strict": True},
            }
        },
        "json",
        JSON,
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", JSON, "response_format.schema"),
    ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", "", "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, "json", JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", '["a","ü"]', "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", "", "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
        "structural_tag",
        "",
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA}, "json", JSON, "guided_json"),
    ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
    ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
    ({"json_schema": SCHEMA, "grammar": ""}, "json", JSON, "json_schema"),
    ({"grammar": "g"}, "grammar", "g", "grammar"),
    ({"regex": "a"}, "regex", "a", "regex"),
    ({"ebnf": "g"}, "grammar", "g", "ebnf"),
]


@pytest.mark.parametrize(("fields", "kind", "source", "param"), ASKED)
def test_each_name_is_understood(fields: dict[str, Any], kind: Kind, source: str, param: str) -> None:
    found = structure(fields)
    assert found is not None
    assert (found.kind, found.param, found.whitespace) == (kind, param, WHITESPACE)
    if source:
        assert found.source == source
    if kind == "structural_tag":
        assert json.loads(found.source) == TAG


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert structure(fields) is None


@pytest.mark.parametrize(
    ("fields", "whitespace"),
    [
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, None),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, None),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}}, "_"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]"}, "[ ]"),
    ],
)
def test_white_space(fields: dict[str, Any], whitespace: str | None) -> None:
    found = structure(fields)
    assert found is not None
    assert found.whitespace == whitespace


FORMAT = "response_format"
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({FORMAT: {"type": "nope"}}, "response_format.type"),
    ({FORMAT: {}}, "response_format.type"),
    ({FORMAT: "json_object"}, "response_format"),
    ({FORMAT: {"type": "json_schema"}}, "response_format.json_schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema.name"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    *(
        (
            {FORMAT: {"type": "json_schema", "json_schema": {"name": name, "schema": {}}}},
            "response_format.json_schema.name",
        )
        for name in ("", "a b", "ü", "x" * 65, "a\n")
    ),
    (
        {FORMAT: {"type": "json_schema", "json_schema": {"name": "x", "schema": [1, 2]}}},
        "response_format.json_schema.schema",
    ),
    ({FORMAT: {"type": "structural_tag", "triggers": ["a"]}}, "response_format.structures"),
    ({FORMAT: {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format.format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, FORMAT: {"type": "json_object"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "grammar": "b"}, "grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice.1"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x" * 257}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"structured_outputs": {"structural_tag": {"triggers": []}}}, "structured_outputs.structural_tag.triggers"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"regex": 5}, "regex"),
]


@pytest.mark.parametrize(("fields", "param"), FAULTS)
def test_faults_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        structure(fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 300
