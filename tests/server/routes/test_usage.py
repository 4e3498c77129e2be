from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.tokenizer import Tokenizer
from tests.server.running import CHAT, COMPLETIONS, Running, running

KEYS = [
    {"name": "root", "key": "r", "admin": True},
    {"name": "alice", "key": "a"},
    {"name": "bob", "key": "b", "requests_per_minute": 1},
]


@pytest.fixture
def keyed(tmp_path: Path, smol: Tokenizer) -> Iterator[Running]:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": KEYS}))
    with running(smol, api_keys_file=file) as server:
        yield server


def usage(server: Running, key: str) -> dict[str | None, dict[str, Any]]:
    """The lines, by name."""
    reply = server.client.get("/usage", headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return {line["name"]: line for line in reply.json()["data"]}


def counts(line: dict[str, Any]) -> dict[str, int]:
    """Those that are not 0."""
    return {name: count for name, count in line.items() if name not in ("name", "days") and count}


def test_what_each_key_has_used(keyed: Running) -> None:
    for key in ("a", "b", "b"):
        keyed.post(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2}, authorization=f"Bearer {key}")
    keyed.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}, **{"x-api-key": "a"})
    keyed.post(COMPLETIONS, {"prompt": [5], "temperature": -1}, **{"x-api-key": "a"})
    keyed.post("/v1/embeddings", {"input": [5, 6]}, **{"x-api-key": "a"})
    lines = usage(keyed, "r")
    assert list(lines) == ["alice", "bob", "root"]
    assert counts(lines["alice"]) == {"requests": 3, "prompt_tokens": 3 + 1 + 2, "completion_tokens": 8 + 1}
    assert counts(lines["bob"]) == {"requests": 1, "rejected": 1, "prompt_tokens": 3, "completion_tokens": 8}
    assert counts(lines["root"]) == {}
    (today,) = lines["alice"]["days"]
    assert len(today.pop("date")) == 10
    assert counts(today) == counts(lines["alice"])


def test_a_key_sees_itself_and_nobody_else(keyed: Running) -> None:
    keyed.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}, **{"x-api-key": "a"})
    assert list(usage(keyed, "a")) == ["alice"]
    assert list(usage(keyed, "b")) == ["bob"]
    assert keyed.client.get("/usage").status_code == 401
    assert keyed.client.get("/usage", headers={"x-api-key": "x"}).status_code == 401


def test_an_answer_that_was_cut_short(keyed: Running) -> None:
    keyed.engine.interval = 0.01
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with keyed.client.stream("POST", CHAT, json=body, headers={"x-api-key": "a"}) as stream:
        lines = stream.iter_lines()
        assert all(next(lines) is not None for _ in range(10))
    keyed.wait(lambda: usage(keyed, "a")["alice"]["aborted"] == 1)
    line = usage(keyed, "a")["alice"]
    assert line["requests"] == 1
    assert 0 < line["completion_tokens"] < 900
    assert line["prompt_tokens"] == len(keyed.engine.submits()[0].prompt_ids)


def test_what_never_ran_costs_nothing(keyed: Running) -> None:
    keyed.engine.fail_with = "no"
    assert keyed.post(COMPLETIONS, {"prompt": [5]}, **{"x-api-key": "a"}).status_code == 500
    assert counts(usage(keyed, "a")["alice"]) == {"requests": 1}


def test_without_keys_there_is_one_line(smol: Tokenizer) -> None:
    """For everybody: who sees it could ask for as much as they like anyhow."""
    with running(smol) as server:
        server.complete(prompt=[5, 6], max_tokens=3, user="somebody")
        (line,) = server.client.get("/usage").json()["data"]
        assert line["name"] is None
        assert counts(line) == {"requests": 1, "prompt_tokens": 2, "completion_tokens": 3}


def test_lines_are_of_keys_not_of_what_clients_say(keyed: Running) -> None:
    """The ledger cannot be made to grow."""
    for number in range(20):
        keyed.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1, "user": f"u{number}"}, **{"x-api-key": "a"})
        keyed.client.post(f"/x{number}", headers={"x-api-key": f"k{number}"})
    assert list(usage(keyed, "r")) == ["alice", "bob", "root"]
    assert keyed.service.ledger.names == {"alice"}
