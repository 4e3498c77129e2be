"""Structured output of the demo model: whatever it would rather say, what it says is what was asked for."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.daemon import Daemon, serve
from tests.e2e.schemas import CLOSED, OPEN, Schema

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEEDS = 3
WORDS = (
    *("north", "south", "east", "west", "spring", "summer", "autumn", "winter"),
    *("gold", "silver", "copper", "iron", "river", "mountain"),
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Of its own: the processes that check grammars would be part of other tests' footprint."""
    with serve("--max-num-seqs", "32", "--kv-cache-memory", "512MiB", "--max-model-len", "2048") as running:
        yield running


def format_of(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of the only choice, streamed or not."""
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        choice = reply.json()["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]
    frames = [frame.removeprefix("data: ") for frame in reply.text.split("\n\n") if frame.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
    text = "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)
    return text, next(c["finish_reason"] for c in reversed(choices) if c["finish_reason"])


def chat(schema: Schema, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Give me an example, please."}
    return {"messages": [message], "response_format": format_of(schema), "max_tokens": 400, **fields}


def ask_all(daemon: Daemon, path: str, bodies: list[dict[str, Any]]) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(post(client, path, body) for body in bodies))

    return asyncio.run(run())


def validate(text: str, schema: Schema) -> None:
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
        value
    )


def test_there_are_enough_schemas() -> None:
    """Of those alone that every answer has to obey to its end."""
    assert len(CLOSED) >= 60


def obey(daemon: Daemon, schemas: dict[str, Schema], temperature: int) -> None:
    """Streamed and not, in another order, with the same seed: valid, and the same."""
    bodies = [chat(schema, temperature=temperature, seed=5) for schema in schemas.values()]
    whole = ask_all(daemon, CHAT, bodies)
    streamed = ask_all(daemon, CHAT, [{**body, "stream": True} for body in reversed(bodies)])[::-1]
    for (name, schema), (text, finish), again in zip(schemas.items(), whole, streamed, strict=True):
        assert finish == "stop", (name, text)
        validate(text, schema)
        assert again == (text, finish), name


def test_every_schema_is_obeyed_streamed_and_not(daemon: Daemon) -> None:
    obey(daemon, CLOSED, 1)


def test_greedy_texts_obey_too(daemon: Daemon) -> None:
    obey(daemon, dict(list(CLOSED.items())[::4]), 0)


def test_open_schemas_are_obeyed_as_far_as_the_text_goes(daemon: Daemon) -> None:
    """Where nothing bounds a text, a small model may talk on to max_tokens; it must not do so with every seed. Streamed
    and not, it says the same."""
    bodies = [
        chat(schema, temperature=1, seed=seed, max_tokens=200) for schema in OPEN.values() for seed in range(SEEDS)
    ]
    answers = ask_all(daemon, CHAT, bodies)
    assert ask_all(daemon, CHAT, [{**body, "stream": True} for body in bodies]) == answers
    for number, (name, schema) in enumerate(OPEN.items()):
        ended = [text for text, finish in answers[number * SEEDS : (number + 1) * SEEDS] if finish == "stop"]
        assert ended, (name, answers[number * SEEDS])
        for text in ended:
            validate(text, schema)


FORCED = [
    "yes",
    " leading x",
    "a    b",
    "ďábel 😀👨‍👩‍👧‍👦 家 e\u0301",
    "a\ufffdb",
    '"quoted" \\ /slash/',
    "\n\ndef f():\n\treturn",
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_texts_are_forced(daemon: Daemon, path: str) -> None:
    start = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    ways: list[dict[str, Any]] = []
    for text in FORCED:
        ways += [{"structured_outputs": {"choice": [text]}}, {"structured_outputs": {"regex": re.escape(text)}}]
        ways += [{"guided_choice": [text], "ignore_eos": True}, {"guided_regex": re.escape(text), "min_tokens": 50}]
    bodies = [{**start, **way, "max_tokens": 60, "temperature": 1, "stream": n % 3 == 0} for n, way in enumerate(ways)]
    answers = ask_all(daemon, path, bodies)
    assert answers == [(text, "stop") for text in FORCED for _ in range(4)]


def test_other_kinds(daemon: Daemon) -> None:
    tag = {
        "triggers": ["<call>"],
        "structures": [{"begin": "<call>", "schema": CLOSED["object"], "end": "</call>"}],
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"grammar": 'start: "a" | "b" /[0-9]{2}/'}}, r"a|b[0-9]{2}"),
        ({"grammar": 'root ::= "yes" | "no" [0-9]\n'}, r"yes|no[0-9]"),
        ({"ebnf": 'root ::= ("x" | "y") "z"\n'}, r"[xy]z"),
        ({"regex": "[a-f]{6}"}, r"[a-f]{6}"),
        ({"json_schema": {"enum": [1, 22]}}, r"1|22"),
        (
            {"structured_outputs": {"json": json.dumps({"const": {"a": 1, "b": [2]}}), "disable_any_whitespace": True}},
            r'\{"a":1,"b":\[2\]\}',
        ),
        ({"guided_json": {"const": {"a": 1}}, "guided_whitespace_pattern": "_"}, r'\{_?"a"_?:_?1_?\}'),
        ({"structured_outputs": {"structural_tag": json.dumps(tag)}, "max_tokens": 20}, r"(?s).*"),
    ]
    answers = ask_all(daemon, COMPLETIONS, [{"prompt": "x", "max_tokens": 60, **fields} for fields, _ in cases])
    for (fields, pattern), (text, _) in zip(cases, answers, strict=True):
        assert re.fullmatch(pattern, text), (fields, text)


def test_every_sequence_of_a_request_has_its_own_place_in_the_grammar(daemon: Daemon) -> None:
    schema = CLOSED["person"]
    fields = chat(schema, n=6, temperature=1.2, seed=3, logprobs=True, top_logprobs=2)
    reply = daemon.client.post(f"{daemon.url}{CHAT}", json=fields, timeout=60).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    for choice in reply["choices"]:
        validate(choice["message"]["content"], schema)
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
        assert all(-9999 <= entry["logprob"] <= 0 for entry in entries)
    assert len(set(texts)) > 1


def test_cut_by_max_tokens(daemon: Daemon) -> None:
    schema = {"const": {"name": "a long constant name that takes many tokens to write down"}}
    whole, cut = ask_all(daemon, CHAT, [chat(schema, temperature=0, max_tokens=n) for n in (60, 6)])
    assert (whole[1], cut[1]) == ("stop", "length")
    assert whole[0].startswith(cut[0])
    assert 0 < len(cut[0]) < len(whole[0])


def test_white_space_is_bounded(daemon: Daemon) -> None:
    """A model that would love to write blanks for ever is held to one, or one new line and its indent."""
    blank = daemon.client.post(f"{daemon.url}/tokenize", json={"prompt": "\n\n\n"}).json()["tokens"][0]
    bodies = [chat(CLOSED["person"], temperature=0, logit_bias={str(blank): 100}, max_tokens=400)]
    ((text, finish),) = ask_all(daemon, CHAT, bodies)
    assert finish == "stop"
    validate(text, CLOSED["person"])
    assert not re.search(r"\s*\n\s*\n", text)


def test_under_preemption_every_text_is_whole(daemon: Daemon) -> None:
    """A pool of 640 tokens for ten prompts and answers of a hundred each: they are preempted, and computed anew."""
    words = WORDS
    fields = {f"field_{i}": {"const": " ".join(words[2 * i : 2 * i + 5])} for i in range(5)}
    expected = {key: value["const"] for key, value in fields.items()}
    with serve("--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-memory", str(640 * 23_040)) as small:
        bodies = [chat(obj_of(fields), temperature=1, seed=n, stream=n % 2 == 0) for n in range(10)]
        answers = ask_all(small, CHAT, bodies)
        assert all(finish == "stop" and json.loads(text) == expected for text, finish in answers)


def obj_of(fields: dict[str, Any]) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


# ---- hostile ----


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for level in range(depth):
        names = [f"a{level}", f"b{level}"]
        schema = {"anyOf": [{"type": "object", "properties": {n: schema}, "required": [n]} for n in names]}
    return schema


def deep(levels: int) -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


SELF = {"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}, {"type": "object"}]}}, "$ref": "#/$defs/n"}
HOSTILE: dict[str, dict[str, Any]] = {
    "regex in regex": {"structured_outputs": {"regex": "((([a-z]{1,300}){1,300}){1,300}x){1,300}"}},
    "pattern in pattern": {"response_format": format_of({"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"})},
    "forced text without an end": {"structured_outputs": {"regex": "a{100000}"}},
    "anyOf 9 deep": {"response_format": format_of(nested(9))},
    "50 deep": {"response_format": format_of(deep(50))},
    "itself": {"response_format": format_of(SELF)},
    "an object in itself": {
        "response_format": format_of({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    },
    "10^5 values": {"structured_outputs": {"choice": [f"value {i}" for i in range(99_999)]}},
    "2 MB of values": {"response_format": format_of({"enum": [f"value {i} " + "x" * 90 for i in range(20_000)]})},
    "minLength": {"response_format": format_of({"type": "string", "minLength": 10**9})},
    "maxItems": {"response_format": format_of({"type": "array", "items": {"type": "string"}, "minItems": 10**9})},
    "multipleOf": {"response_format": format_of({"type": "integer", "multipleOf": 999_983})},
    "5,000 optional fields": {
        "response_format": format_of({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}})
    },
    "ambiguous": {"structured_outputs": {"grammar": 'start: a\na: a a a | a a | "x" | "" \n'}},
    "negations": {"structured_outputs": {"grammar": "start: A\nA: ~/(.*a.{15})/ & /.*b.{15}.*/ & /.*c.{15}.*/\n"}},
}


def test_hostile_grammars_are_answered_in_time_and_no_stream_notices(daemon: Daemon) -> None:
    """200 with a text that obeys, or 400; within five seconds, one after the other and then at once; beside them a
    stream keeps its pace."""
    arrivals: list[float] = []

    async def stream(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", COMPLETIONS, json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    arrivals.append(time.monotonic())
                if done.is_set():
                    return

    async def attack(client: httpx.AsyncClient, name: str) -> None:
        began = time.monotonic()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **HOSTILE[name]}
        reply = await client.post(CHAT, json=body)
        assert time.monotonic() - began < 5, name
        assert reply.status_code in (200, 400, 429), (name, reply.text)
        if reply.status_code == 400:
            assert reply.json()["error"]["code"] == "invalid_grammar", (name, reply.text)

    async def run() -> None:
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as client:
            watched = asyncio.create_task(stream(client, done))
            while len(arrivals) < 50:
                await asyncio.sleep(0.01)
            before = gaps(arrivals[-50:])
            for name in HOSTILE:
                await attack(client, name)
            await asyncio.gather(*(attack(client, name) for name in HOSTILE))
            during = gaps(arrivals[50:])
            done.set()
            await watched
            # A checker may take a core, and the stream its part of the other.
            assert max(during) < 1, max(during)
            assert sorted(during)[len(during) // 2] < 4 * sorted(before)[len(before) // 2] + 0.02

    asyncio.run(run())
    daemon.wait(daemon.at_rest, 2, "blocks freed")


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def test_a_client_that_leaves_takes_its_compilation_along(daemon: Daemon) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **HOSTILE["multipleOf"]}
    body["response_format"] = format_of({"type": "integer", "multipleOf": 999_979})
    with pytest.raises(httpx.ReadTimeout):
        daemon.client.post(f"{daemon.url}{CHAT}", json=body, timeout=0.5)

    def idle() -> bool:
        before = sum(p.cpu_times().user for p in daemon.processes())
        time.sleep(0.3)
        return sum(p.cpu_times().user for p in daemon.processes()) - before < 0.1

    daemon.wait(idle, 1.5, "the processor is idle again")
