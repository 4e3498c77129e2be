"""Grammars over real HTTP, with a fake engine: what reaches it, what is refused, and what a refusal costs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from model.grammar import Vocabulary
from model.tokenizer import Tokenizer
from server.errors import InvalidGrammar, Overloaded, Unavailable
from server.structured import compiler
from server.structured.compiler import MAX_CHARS, Structures
from server.structured.structure import GrammarError, Kind, Structure, json_rule, serialise, tags_to_lark
from tests.server.running import CHAT, COMPLETIONS, Running

SLOW = {"type": "integer", "multipleOf": 999_983}
"""Takes the library some ten seconds."""


def structure(kind: Kind, source: Any) -> Structure:
    return Structure(kind, source if isinstance(source, str) else json.dumps(source), "field")


# ---- serialise ----


def test_white_space_is_part_of_the_grammar() -> None:
    assert json.loads(json_rule({"type": "null"}, None))["x-guidance"] == {"whitespace_flexible": False}
    own = {"x-guidance": {"lenient": True, "whitespace_pattern": "[ ]*"}}
    assert json.loads(json_rule(own, "_"))["x-guidance"] == {"lenient": True, "whitespace_pattern": "_"}


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json", [1], "must be a JSON object"),
        ("grammar", "x", "neither Lark nor GBNF"),
        (
            "structural_tag",
            {"triggers": ["<b"], "structures": [{"begin": "<a", "schema": {}, "end": ""}]},
            "structure 0",
        ),
    ],
)
def test_what_is_no_source(kind: Kind, source: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        serialise(structure(kind, source))


def test_tags_name_what_follows_their_trigger() -> None:
    tag = {
        "triggers": ["<a"],
        "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}, {"begin": "<a", "schema": {}, "end": ""}],
    }
    lark = tags_to_lark(tag, None).splitlines()
    assert lark[0] == "start: (tag_0 | tag_1)* tail"
    assert 'tag_0_head[lazy]: TEXT "<a"' in lark
    assert any(line.startswith('tag_0: tag_0_head ">" %json {') and line.endswith('"</a>"') for line in lark)
    assert any(line.startswith("tag_1: tag_1_head %json {") and line.endswith("}") for line in lark)


TAG = {"triggers": ["<"], "structures": [{"begin": "<", "schema": {}, "end": ""}]}
OPEN = "a\\"
"""A regex that breaks off."""
IN_LARK = "start: A\nA: %json "


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", OPEN),
        ("json", {"type": "string", "pattern": OPEN}),
        ("json", {"type": "string", "pattern": "\\" * 3}),
        ("json", {"properties": {"default": {"items": [{"not": {"pattern": OPEN}}]}}}),
        ("json", {"patternProperties": {OPEN: {}}}),
        ("json", {"$defs": {"enum": {"anyOf": [{"pattern": OPEN}]}}}),
        ("structural_tag", {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"pattern": OPEN}, "end": ""}]}),
        ("lark", IN_LARK + json.dumps({"pattern": OPEN})),
        ("grammar", IN_LARK + "{}\nB: %json " + json.dumps({"pattern": OPEN})),
    ],
)
def test_a_regex_that_breaks_off(kind: Kind, source: Any) -> None:
    """The library would leave the backslash out."""
    with pytest.raises(GrammarError, match="a backslash at the end"):
        serialise(structure(kind, source))


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"const": 2**53 + 1}, False),
        ({"items": {"enum": ["a", {"id": [-(2**60) - 1]}]}}, False),
        ({"properties": {"const": {"enum": [1234567890123456789]}}}, False),
        ({"type": "integer", "minimum": 1e30}, False),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, False),
        ({"enum": [2**53, -(2**60), 3 * 2**60, 0, True, 0.1, "9007199254740993"]}, True),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, True),
        ({"type": "string", "default": 2**53 + 1}, True),
    ],
)
def test_numbers_that_would_be_others(schema: Any, kept: bool) -> None:
    """The library makes doubles of them, so that an id of 19 digits would be answered with another one."""
    for asked in (structure("json", schema), structure("lark", IN_LARK + json.dumps(schema))):
        if kept:
            assert serialise(asked)
        else:
            with pytest.raises(GrammarError, match="beyond what is kept to exactly"):
                serialise(asked)


def test_white_space_that_breaks_off() -> None:
    for asked in (structure("json", {}), structure("structural_tag", TAG)):
        with pytest.raises(GrammarError, match="a backslash at the end"):
            serialise(replace(asked, whitespace=OPEN))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a\\\\"},
        {"const": {"pattern": OPEN}},
        {"enum": [OPEN, {"pattern": OPEN}], "default": {"pattern": OPEN}},
        {"properties": {"pattern": {"type": "string"}, OPEN: {}}, "pattern": 5},
    ],
)
def test_what_only_looks_like_such_a_regex(schema: dict[str, Any]) -> None:
    assert serialise(structure("json", schema))


# ---- structures ----


@pytest.fixture
def vocabulary(smol: Tokenizer) -> Vocabulary:
    return Vocabulary.of(smol, smol.vocab_size)


@pytest.fixture
async def structures(vocabulary: Vocabulary) -> Any:
    made = Structures(lambda: vocabulary)
    yield made
    made.close()


async def refusal(structures: Structures, asked: Structure) -> str:
    with pytest.raises(InvalidGrammar) as caught:
        await structures.grammar(asked)
    assert (caught.value.param, caught.value.code, caught.value.status) == ("field", "invalid_grammar", 400)
    return caught.value.message


async def test_good_ones_pass_and_are_remembered(structures: Structures) -> None:
    assert await structures.grammar(None) is None
    asked = structure("json", {"type": "integer", "minimum": 0})
    assert await structures.grammar(asked) == serialise(asked)
    processes = [checker._process for checker in structures._all]
    for process in processes:
        assert process is not None
        process.kill()
        process.wait()
    assert await structures.grammar(asked) == serialise(asked), "nobody has to be asked again"
    other = structure("regex", "[0-9]+")
    assert await structures.grammar(other) == serialise(other), "who has died is started anew"


async def test_every_character_may_be_chosen(structures: Structures, smol: Tokenizer) -> None:
    written = [
        chr(code) for code in range(0x100) if smol.decode(smol.encode(chr(code), add_special_tokens=False)) == chr(code)
    ]
    assert len(written) > 200
    texts = ["".join(written), "\u2028\ufeff\ue000\ufdd0\U0010ffff"]
    assert await structures.grammar(structure("choice", texts))
    for number in ("41", "u0041", "U00000041"):
        escape = number if number[0] in "uU" else f"x{number}"
        assert "A1B" in serialise(structure("grammar", rf'root ::= "\{escape}1\x42"'))
    assert r"[\x5d\x2d]" in serialise(structure("grammar", r"root ::= [\u005d\u002d]"))


async def test_bad_ones_say_why(structures: Structures) -> None:
    cases: list[tuple[Structure, str]] = [
        (structure("regex", "("), "unclosed group"),
        (structure("regex", "a\\"), "backslash"),
        (structure("json", {"type": "string", "pattern": "a\\"}), "backslash"),
        (structure("json", {"type": "nope"}), "nope"),
        (structure("json", {"not": {}}), "not"),
        (structure("json", {"$ref": "https://example.org/x"}), "example.org"),
        (structure("json", {"type": "string", "format": "nope"}), "nope"),
        (structure("grammar", "start: missing"), "missing"),
        (structure("regex", "a{100000}"), "too complex"),
        (structure("regex", "(a?){2000}a{2000}"), "too complex"),
        (structure("json", {"type": "string", "pattern": "(?=x)"}), "look-around"),
        (structure("choice", ["x" * MAX_CHARS]), f"more than {MAX_CHARS}"),
        (structure("regex", "x" * (MAX_CHARS + 1)), f"more than {MAX_CHARS}"),
    ]
    for asked, words in cases:
        message = await refusal(structures, asked)
        assert words in message
        assert "\n" not in message
        assert len(message) <= 600


async def test_what_takes_too_long_is_ended(structures: Structures) -> None:
    await structures.grammar(structure("regex", "a"))
    began = time.monotonic()
    message = await refusal(structures, structure("json", SLOW))
    assert "too complex" in message
    took = time.monotonic() - began
    assert took < 5
    if "busy" not in message:
        began = time.monotonic()
        assert await refusal(structures, structure("json", SLOW)) == message
        assert time.monotonic() - began < took / 2, "a verdict is remembered"
    assert await structures.grammar(structure("regex", "b"))


async def test_who_leaves_takes_the_work_along(structures: Structures) -> None:
    await structures.grammar(structure("regex", "a"))
    task = asyncio.create_task(structures.grammar(structure("json", SLOW)))
    while len(structures._free) == len(structures._all):
        await asyncio.sleep(0.01)
    (busy,) = set(structures._all) - set(structures._free)
    process = busy._process
    assert process is not None
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.wait(1) != 0
    assert len(structures._free) == len(structures._all)
    assert await structures.grammar(structure("regex", "b"))


async def test_who_was_starved_is_no_lesson(structures: Structures) -> None:
    """The clock says nothing of a grammar on a busy machine: the verdict is not kept."""
    await structures.grammar(structure("regex", "a"))
    asked = structure("json", SLOW)
    task = asyncio.create_task(refusal(structures, asked))
    while len(structures._free) == len(structures._all):
        await asyncio.sleep(0.01)
    (busy,) = set(structures._all) - set(structures._free)
    process = busy._process
    assert process is not None
    process.send_signal(signal.SIGALRM)
    assert "busy" in await task
    assert asked not in structures._known
    assert await structures.grammar(structure("regex", "b"))


async def test_checkers_that_do_not_start_are_tried_again(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(compiler, "COMMAND", (sys.executable, "-c", ""))
        with pytest.raises(Unavailable):
            await structures.grammar(structure("regex", "a"))
    assert await structures.grammar(structure("regex", "a"))


async def test_checkers_that_start_slowly_keep_nobody_waiting(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "START_SECONDS", 0.1)
    monkeypatch.setattr(compiler, "COMMAND", (sys.executable, "-c", "import time; time.sleep(5)"))
    with pytest.raises(Overloaded):
        await structures.grammar(structure("regex", "a"))


async def test_who_finds_no_turn_is_told_to_come_back(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "WAIT_SECONDS", 0.2)
    await structures.grammar(structure("regex", "a"))
    held = threading.Event()
    monkeypatch.setattr(compiler.Checker, "ask", lambda checker, frame: held.wait(30) and None)
    taken = [asyncio.create_task(refusal(structures, structure("regex", name))) for name in "cd"]
    while structures._free:
        await asyncio.sleep(0.01)
    assert await structures.grammar(structure("regex", "a")), "what is known needs no turn"
    with pytest.raises(Overloaded) as caught:
        await structures.grammar(structure("regex", "b"))
    assert caught.value.reason == "grammar_checkers"
    held.set()
    await asyncio.gather(*taken)


async def test_verdicts_are_bounded(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CACHED_CHARS", 100)
    for number in range(30):
        await structures.grammar(structure("regex", f"[a-z]{{{number + 10}}}"))
    assert structures._chars == sum(len(asked.source) for asked in structures._known) <= 100
    assert len(structures._known) > 1


# ---- over HTTP ----

GOOD: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"guided_regex": "a+"},
    {"grammar": 'root ::= "a"'},
]


@pytest.mark.parametrize("fields", GOOD)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_engine_gets_the_grammar(server: Running, path: str, fields: dict[str, Any]) -> None:
    start = {"prompt": ["x", "y"]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    assert server.post(path, {**start, **fields, "max_tokens": 2, "n": 2}).status_code == 200
    grammars = [submit.params.grammar for submit in server.engine.submits()]
    assert len(grammars) == (2 if path == COMPLETIONS else 1)
    assert all(grammars)


def test_a_plain_request_has_none(server: Running) -> None:
    assert server.chat(response_format={"type": "text"}).status_code == 200
    assert server.engine.submits()[0].params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_fault_is_told_before_any_header_of_a_stream(server: Running, path: str, stream: bool) -> None:
    start = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"pattern": OPEN}}}, "structured_outputs.json"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "x" * (MAX_CHARS + 1)}}, "structured_outputs.regex"),
    ]
    for fields, param in cases:
        reply = server.post(path, {**start, **fields, "stream": stream})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_grammar", param)
    assert server.engine.received == []


def test_many_prompts_share_a_bound(server: Running) -> None:
    fields = {"structured_outputs": {"choice": [f"choice number {i}" for i in range(500)]}}
    reply = server.complete(prompt=["x"] * 512, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.fixture
def ticking(server: Running) -> Iterator[list[float]]:
    """Gaps between answers of /health while the test runs."""
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=10) as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                gaps.append(time.monotonic() - began)

    thread = threading.Thread(target=watch)
    thread.start()
    yield gaps
    done.set()
    thread.join()


def test_the_loop_does_not_wait_for_a_grammar(server: Running, ticking: list[float]) -> None:
    assert server.chat(structured_outputs={"json": SLOW}).status_code == 400
    assert len(ticking) > 10
    assert max(ticking) < 1, "a second passes until the grammar is given up"
