"""Requests made to cost: each is refused in seconds, and a stream beside them keeps its pace."""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SECONDS = 5.0
TURNS = {"turns": 100_000}
ENDLESS = "{% for i in range(turns) %}{% for j in range(turns) %}{% endfor %}{% endfor %}x"
GROWING = "{% set ns = namespace(a='x') %}{% for i in range(99999) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}"


def nested(depth: int) -> dict[str, Any]:
    """oneOf in oneOf: twice as large with every level."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        sides = [{"type": "object", "properties": {f"{s}{level}": schema}, "required": [f"{s}{level}"]} for s in "ab"]
        schema = {"oneOf": sides}
    return schema


def schema(value: Any) -> dict[str, Any]:
    return {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, "max_tokens": 4, **fields}).encode()


def template(source: str, **fields: Any) -> bytes:
    return chat(chat_template=source, **fields)


TO_A = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ATTACKS: list[tuple[str, str, bytes]] = [
    ("n of a billion", COMPLETIONS, completion(n=10**9)),
    ("best_of a billion", COMPLETIONS, completion(best_of=10**9)),
    ("128 x 1,024 sequences", COMPLETIONS, completion(prompt=["x"] * 1024, best_of=128)),
    ("100,000 stops", COMPLETIONS, completion(stop=[f"q{i}" for i in range(100_000)])),
    ("a stop of a megabyte", COMPLETIONS, completion(stop="q" * 2**20)),
    ("a million biases", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(10**6)})),
    ("a million allowed tokens", COMPLETIONS, completion(allowed_token_ids=list(range(10**6)))),
    ("100,000 scored tokens", COMPLETIONS, completion(logprobs=0, logprob_token_ids=[5] * 100_000)),
    ("50,000 bad words", COMPLETIONS, completion(bad_words=[f"w{i}" for i in range(50_000)])),
    ("metadata of a megabyte", CHAT, chat(metadata={"k": "v" * 2**20})),
    ("100,000 documents", CHAT, chat(documents=[{"text": "t"}] * 100_000)),
    ("JSON of 100,000 levels", CHAT, b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("unclosed JSON of a million levels", CHAT, b'{"messages":' + b'[{"a":' * 10**6),
    ("kwargs of 65 levels", CHAT, b'{"messages":[],"chat_template_kwargs":{"a":' + b"[" * 65 + b"]" * 65 + b"}}"),
    ("a schema that is itself", CHAT, json.dumps(schema({"$ref": "#"})).encode()),
    ("schemas that are each other", CHAT, json.dumps(schema({"$defs": TO_A, "$ref": "#/$defs/a"})).encode()),
    ("allOf of itself", CHAT, json.dumps(schema({"allOf": [{"$ref": "#"}, {"type": "object"}]})).encode()),
    ("oneOf of 16 levels", CHAT, json.dumps(schema(nested(16))).encode()),
    ("an enum of 2 MB", CHAT, json.dumps(schema({"enum": ["x" * 90 + str(i) for i in range(20_000)]})).encode()),
    ("a regex of many words", COMPLETIONS, completion(structured_outputs={"regex": "(\\w{1,99} ?){1,9}x" * 400})),
    ("a template that loops", CHAT, template(ENDLESS, chat_template_kwargs=TURNS)),
    ("a template that grows", CHAT, template(GROWING)),
    ("a template of many numbers", CHAT, template("{{ [1] | batch(1000000000) | list }}")),
    ("a template that looks inside", CHAT, template("{{ ''.__class__.__mro__ }}")),
    ("a template of 1,000,000 digits", CHAT, template("{{ " + "9" * 60_000 + " }}")),
    ("a template of a megabyte", CHAT, template("x" * 2**20)),
    ("a template nested 5,000 deep", CHAT, template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")),
    ("ten megabytes of text", COMPLETIONS, completion(prompt="lorem ipsum " * 870_000)),
]


def gaps(url: str, until: threading.Event) -> list[float]:
    """Seconds between the events of streams, one after the other, until something else is done."""
    found: list[float] = []
    body = {"prompt": "The story of a long day:", "max_tokens": 1500, "ignore_eos": True, "stream": True, "seed": 1}
    with httpx.Client(base_url=url, timeout=60) as client:
        while not until.is_set():
            with client.stream("POST", COMPLETIONS, json=body) as reply:
                last = 0.0
                for line in reply.iter_lines():
                    if line:
                        now = time.monotonic()
                        found += [now - last] if last else []
                        last = now
                    if until.is_set():
                        break
    return found


@pytest.fixture(scope="module")
def trusting() -> Any:
    """Takes templates from requests, so that there is more to attack."""
    with serve("--max-model-len", "2048", "--trust-request-chat-template") as daemon:
        yield daemon


def test_hostile_requests_are_refused_while_a_stream_keeps_its_pace(trusting: Daemon) -> None:
    wrong: list[str] = []

    def attack() -> None:
        with httpx.Client(base_url=trusting.url, timeout=60) as client:
            for label, path, body in ATTACKS:
                begun = time.monotonic()
                reply = client.post(path, content=body, headers={"content-type": "application/json"})
                took = time.monotonic() - begun
                if reply.status_code != 400 or took > SECONDS or "Traceback" in reply.text:
                    wrong.append(f"{label}: {reply.status_code} after {took:.1f} s: {reply.text[:200]}")

    def beside(work: Any) -> list[float]:
        done = threading.Event()
        found: list[float] = []
        reader = threading.Thread(target=lambda: found.extend(gaps(trusting.url, done)))
        reader.start()
        try:
            work()
        finally:
            done.set()
            reader.join()
        return found

    alone = beside(lambda: time.sleep(3))
    attacked = beside(attack)
    assert not wrong, "\n".join(wrong)
    assert len(attacked) > 20
    assert statistics.median(attacked) < 3 * statistics.median(alone), "the stream became slow"
    assert max(attacked) < max(1.0, 4 * max(alone)), f"the stream stood still for {max(attacked):.1f} s"
    trusting.wait(trusting.at_rest, 2, "blocks freed")
