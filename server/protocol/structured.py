"""The many names under which clients say what an answer must look like, and the one Structure that they come to."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from model.config_fields import MAX_DEPTH, depth
from server.errors import InvalidRequest
from server.protocol.base import Body, variant
from server.structured.structure import WHITESPACE, Kind, Structure

Source = tuple[Kind, str, Any]
"""Kind, the field that asks for it, and what it holds."""
MAX_CHOICES = 100_000
MAX_TAGS = 128
MAX_TEXT = 256 * 1024
"""Characters of JSON in a text, which the limits of a body do not look into; no grammar may have more either."""


def _parsed(value: object) -> object:
    """A schema or tag may also come as its JSON text."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT:
        raise ValueError(f"longer than {MAX_TEXT} characters")
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be an object, or its JSON text: {error}") from None
    if depth(parsed) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return parsed


Schema = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Text = Annotated[str, StringConstraints(min_length=1)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class TagStructure(Body):
    """What follows a trigger: `begin`, a text of the schema, `end`."""

    begin: Tag
    schema_: Schema = Field(alias="schema")
    end: Annotated[str, StringConstraints(max_length=1024)] = ""


class StructuralTag(Body):
    """Free text, until a trigger begins one of the structures."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"format": ()}

    type: Literal["structural_tag"] = "structural_tag"
    triggers: Annotated[list[Tag], Field(min_length=1, max_length=MAX_TAGS)]
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_TAGS)]


class JsonSchema(Body):
    """`response_format.json_schema`. It constrains whether `strict` or not."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """`schema` beside json_object is llama.cpp's."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                *(variant("type", kind) for kind in ("text", "json_object")),
                variant("type", "json_schema", "json_schema"),
                variant("type", "structural_tag", "triggers", "structures"),
            ]
        }
    )

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"format": ()}

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    triggers: Annotated[list[Tag], Field(min_length=1, max_length=MAX_TAGS)] | None = None
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=MAX_TAGS)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {"json_schema": ("json_schema",), "structural_tag": ("triggers", "structures")}
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise InvalidRequest(
                    f"response_format.{name}: needed where type is {self.type}", param=f"response_format.{name}"
                )
        return self

    def sources(self) -> list[Source]:
        match self.type:
            case "text":
                return []
            case "json_schema":
                assert self.json_schema is not None
                return [("json", "response_format.json_schema.schema", self.json_schema.schema_)]
            case "structural_tag":
                return [("structural_tag", "response_format", self)]
            case "json_object" if self.schema_ is not None:
                return [("json", "response_format.schema", self.schema_)]
            case "json_object":
                return [("json_object", "response_format", {})]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one kind, and how JSON may be laid out."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"disable_additional_properties": (False,)}

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Annotated[StructuralTag, BeforeValidator(_parsed)] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Annotated[str, StringConstraints(max_length=256)] | None = None

    def sources(self) -> list[Source]:
        """Every kind that is asked for."""
        found: list[tuple[Kind, Any]] = [
            ("json", self.json_),
            ("json_object", {} if self.json_object else None),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
            ("structural_tag", self.structural_tag),
        ]
        return [(kind, f"structured_outputs.{kind}", source) for kind, source in found if source is not None]


class StructureFields(Body):
    """Of /v1/completions and /v1/chat/completions. At most one of them may constrain the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Schema | None, Field(description="as structured_outputs.json")] = None
    guided_regex: Annotated[Text | None, Field(description="as structured_outputs.regex")] = None
    guided_choice: Annotated[Choices | None, Field(description="as structured_outputs.choice")] = None
    guided_grammar: Annotated[Text | None, Field(description="as structured_outputs.grammar")] = None
    guided_whitespace_pattern: Annotated[str, StringConstraints(max_length=256)] | None = None
    json_schema: Annotated[Schema | None, Field(description="llama.cpp, SGLang: structured_outputs.json")] = None
    grammar: Annotated[str, Field(description="llama.cpp: structured_outputs.grammar")] = ""
    regex: Annotated[str, Field(description="SGLang: structured_outputs.regex")] = ""
    ebnf: Annotated[str, Field(description="SGLang: structured_outputs.grammar")] = ""

    @cached_property
    def structure(self) -> Structure | None:
        """What the answer must look like. Raises InvalidRequest where that is said twice, or not at all."""
        outputs, form = self.structured_outputs, self.response_format
        found: list[Source] = []
        if form is not None:
            found += form.sources()
        if outputs is not None:
            found += outputs.sources()
        named: list[tuple[Kind, str]] = [
            *(("json", "guided_json"), ("regex", "guided_regex"), ("choice", "guided_choice")),
            *(("grammar", "guided_grammar"), ("json", "json_schema"), ("grammar", "grammar")),
            *(("regex", "regex"), ("grammar", "ebnf")),
        ]
        found += [(kind, name, value) for kind, name in named if (value := getattr(self, name)) not in (None, "")]
        if len(found) > 1:
            fields = ", ".join(field for _, field, _ in found)
            raise InvalidRequest(f"{found[1][1]}: only one of {fields} may be given", param=found[1][1])
        if not found:
            if outputs is not None:
                raise InvalidRequest(
                    "structured_outputs: needs one of json, json_object, regex, choice, grammar and structural_tag",
                    param="structured_outputs",
                )
            return None
        kind, field, source = found[0]
        return Structure(kind, _text(source), field, self._whitespace())

    @model_validator(mode="after")
    def _one(self) -> Self:
        _ = self.structure
        return self

    def _whitespace(self) -> str | None:
        outputs, pattern = self.structured_outputs, self.guided_whitespace_pattern
        if outputs is not None:
            if outputs.disable_any_whitespace:
                return None
            pattern = outputs.whitespace_pattern if outputs.whitespace_pattern is not None else pattern
        return WHITESPACE if pattern is None else pattern or None


def _text(source: Any) -> str:
    """A string as it is, anything else as JSON."""
    if isinstance(source, str):
        return source
    if isinstance(source, Body):
        source = source.model_dump(by_alias=True, include={"triggers", "structures"})
    return orjson.dumps(source).decode()
