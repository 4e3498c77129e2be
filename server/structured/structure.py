"""Structure: what an answer must look like, in one of the forms that clients know, and its way into llguidance's form.

json, json_object ──┐
regex, choice ──────┼─▶ serialise ─▶ llguidance's serialised grammar, one string: `SamplingParams.grammar`
lark, grammar ──────┤
structural_tag ─────┘
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from server.structured.patterns import inexact, patterns, schemas

Kind = Literal["json", "json_object", "regex", "choice", "lark", "grammar", "structural_tag"]

WHITESPACE = r" |\n[ \t]{0,20}"
"""What may stand once between two parts of a JSON text: enough for every usual layout, too little to go on for ever."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|.)", re.DOTALL)
_ESCAPED = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "]": r"\x5d", "^": r"\x5e", "-": r"\x2d"}
"""Characters that would mean something else in GBNF, or in what becomes of it."""


class GrammarError(ValueError):
    """Not a schema, regex or grammar that can be enforced; one line for the client."""


@dataclass(frozen=True, slots=True)
class Structure:
    """One constraint."""

    kind: Kind
    source: str
    """json: the schema. choice: a JSON list of strings. structural_tag: JSON, see `tags_to_lark`. regex, lark, grammar
    (Lark or GBNF): the text itself. json_object: not read.

    In Lark special tokens are written by name, `<|python_tag|>`, or by id, `<[5]>`; no text ever matches one. A schema
    in it is written `%json` and what `json_rule` gives."""
    param: str
    """The request's field, for messages about it."""
    whitespace: str | None = WHITESPACE
    """A regex of the white space of JSON, matched at most once in a place; None: none at all."""


def json_rule(schema: dict[str, Any], whitespace: str | None = WHITESPACE) -> str:
    """The schema as the argument of `%json` in a Lark grammar, its white space bounded."""
    layout = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    own = schema.get("x-guidance")
    return json.dumps({**schema, "x-guidance": {**own, **layout} if isinstance(own, dict) else layout})


def serialise(structure: Structure) -> str:
    """llguidance's form, not yet checked. Takes its time where the source is long. Raises GrammarError."""
    source = structure.source
    match structure.kind:
        case "json" | "json_object":
            schema = json.loads(source) if structure.kind == "json" else {"type": "object"}
            if not isinstance(schema, dict):
                raise GrammarError("a schema must be a JSON object")
            rule = json_rule(schema, structure.whitespace)
            _check_schema(json.loads(rule))
            return LLMatcher.grammar_from_json_schema(rule)
        case "regex":
            if _breaks_off(source):
                raise GrammarError("a backslash at the end escapes nothing")
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(quoted, json.loads(source))))
        case "lark":
            return _from_lark(source)
        case "grammar":
            return _from_lark(_lark(source))
        case "structural_tag":
            return _from_lark(tags_to_lark(json.loads(source), structure.whitespace))


def _from_lark(source: str) -> str:
    _check_schema(list(schemas(source)))
    return LLMatcher.grammar_from_lark(source)


def _check_schema(schema: Any) -> None:
    for regex in patterns(schema):
        if _breaks_off(regex):
            raise GrammarError(f"pattern {regex[-40:]!a}: a backslash at the end escapes nothing")
    for number in inexact(schema):
        raise GrammarError(f"the number {number} is beyond what is kept to exactly; a string has no limit")


def _breaks_off(regex: str) -> bool:
    """Whether it ends in the middle of an escape. llguidance would drop the backslash."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF in Lark."""
    if is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(_written_out, grammar))
    except Exception as error:  # the converter has many ways to say that a text is no grammar
        raise GrammarError(f"neither Lark nor GBNF: {error}") from None


def _written_out(escape: re.Match[str]) -> str:
    """The character that an escape by number stands for, where GBNF reads it as itself. The converter takes the zeros
    from the front of a number, and so makes other characters of what stands behind it."""
    digits = escape[1] or escape[2] or escape[3]
    code = -1 if digits is None else int(digits, 16)
    known = 0x20 <= code < 0xD800 or 0xE000 <= code < 0x110000 or code in (9, 10, 13)
    return _ESCAPED.get(chr(code), chr(code)) if known else escape[0]


def tags_to_lark(tag: dict[str, Any], whitespace: str | None) -> str:
    """Free text in which a trigger must go on as one of the structures: {"triggers": [text], "structures": [{"begin":
    text, "schema": object, "end": text}]}. Raises GrammarError where a structure begins with no trigger."""
    rules, names = ["TEXT: /(?s:.*)/", "tail: TEXT"], []
    for number, structure in enumerate(tag["structures"]):
        begin = structure["begin"]
        trigger = next((trigger for trigger in tag["triggers"] if begin.startswith(trigger)), None)
        if not trigger:
            raise GrammarError(f"structure {number} begins with none of the triggers")
        name = f"tag_{number}"
        names.append(name)
        rest, schema = begin.removeprefix(trigger), json_rule(structure["schema"], whitespace)
        body = [*map(quoted, filter(None, [rest])), f"%json {schema}", *map(quoted, filter(None, [structure["end"]]))]
        rules += [f"{name}_head[lazy]: TEXT {quoted(trigger)}", f"{name}: {name}_head {' '.join(body)}"]
    return "\n".join([f"start: ({' | '.join(names)})* tail", *rules])


def quoted(text: str) -> str:
    """A literal in Lark. Of what JSON leaves as it is, llguidance does not read U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
