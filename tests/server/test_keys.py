"""The key ring, over real sockets: who comes in, until when, and how the file is read again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.tokenizer import Tokenizer
from server.errors import AuthenticationError
from server.keys import KeyRing
from server.settings import Settings
from tests.server.running import CHAT, COMPLETIONS, Running, running
from tests.server.test_daemon import daemon, until

SECRETS = ("alice-secret", "bob-secret", "carol-secret", "plain-secret")


def key_file(folder: Path, *entries: dict[str, Any]) -> Path:
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": entries}))
    return file


def named(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "key": f"{name}-secret", **fields}


def made(**flags: Any) -> KeyRing:
    return KeyRing(Settings(**flags))


def who(ring: KeyRing, sent: str) -> str:
    """The name of the key, or the code of the refusal."""
    try:
        return ring.find(sent).name
    except AuthenticationError as error:
        return error.code


def test_whose_key_it_is(tmp_path: Path) -> None:
    file = key_file(tmp_path, named("alice"), named("bob", weight=3))
    ring = made(api_keys_file=file, api_key=["plain-secret", "bob-secret", "plain-secret"])
    assert ring
    assert [who(ring, sent) for sent in SECRETS] == ["alice", "bob", "invalid_api_key", "api-key-3"]
    assert ring.find("bob-secret").weight == 3  # the file's, though it is in both
    for wrong in ("", "alice", "alice-secret ", "ALICE-SECRET", "alice-secretx", "é"):
        assert who(ring, wrong) == "invalid_api_key"


def test_without_keys_nobody_needs_one() -> None:
    assert not KeyRing(Settings())


def test_every_key_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time says nothing of which one it was, or how much of it was right."""
    ring = KeyRing(Settings(api_keys_file=key_file(tmp_path, *(named(f"n{number}") for number in range(20)))))
    compared = 0

    def compare(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        assert len(one) == len(other) == 32
        return one == other

    monkeypatch.setattr("server.keys.hmac.compare_digest", compare)
    for sent in ("n0-secret", "n19-secret", "n5-secre", ""):
        compared = 0
        who(ring, sent)
        assert compared == 20


def test_keys_expire(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    file = key_file(tmp_path, named("alice", expires="2027-01-15T08:00:01Z"), named("bob"))
    ring = KeyRing(Settings(api_keys_file=file), lambda: now)
    assert who(ring, "alice-secret") == "alice"
    now += 1
    assert who(ring, "alice-secret") == "expired_api_key"
    assert who(ring, "bob-secret") == "bob"


def test_the_file_is_read_again_whole_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "octavo.keys")
    file = key_file(tmp_path, named("alice"))
    ring = made(api_keys_file=file, api_key=["plain-secret"])
    key_file(tmp_path, named("bob"), named("carol"))
    ring.reload()
    assert [who(ring, sent) for sent in SECRETS] == ["invalid_api_key", "bob", "carol", "api-key-1"]
    for bad in ("{", json.dumps({"keys": []}), json.dumps({"keys": [named("alice"), named("bob", weight=-1)]})):
        file.write_text(bad)
        caplog.clear()
        ring.reload()
        assert [who(ring, sent) for sent in SECRETS] == ["invalid_api_key", "bob", "carol", "api-key-1"]
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert str(file) in record.getMessage()
        assert "secret" not in record.getMessage()
    file.unlink()
    ring.reload()
    assert who(ring, "bob-secret") == "bob"


def asked(server: Running, key: str) -> Any:
    return server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, authorization=f"Bearer {key}")


def test_over_http(tmp_path: Path, smol: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    old = named("carol", expires="2020-01-01")
    file = key_file(tmp_path, named("alice", weight=2.5), named("bob"), old)
    with running(smol, api_keys_file=file, api_key=["plain-secret"]) as server:
        for key in ("alice-secret", "bob-secret", "plain-secret"):
            assert asked(server, key).status_code == 200
        for key, code in (("wrong-secret", "invalid_api_key"), ("carol-secret", "expired_api_key")):
            reply = asked(server, key)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, code)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "x-should-retry" not in reply.headers
            assert server.client.get("/health", headers={"x-api-key": key}).status_code == 200
            assert server.client.get("/usage", headers={"x-api-key": key}).status_code == 401
            assert server.client.get("/nowhere", headers={"x-api-key": key}).status_code == 401
        submits = server.engine.submits()
        assert [(submit.tenant, submit.weight) for submit in submits] == [
            ("alice", 2.5),
            ("bob", 1.0),
            ("api-key-1", 1.0),
        ]
        assert len({submit.salt for submit in submits}) == 3
        assert not any(b"secret" in submit.salt for submit in submits)
        key_file(tmp_path, named("alice"), named("carol"))
        server.call(server.service.keys.reload)
        assert [asked(server, key).status_code for key in SECRETS] == [200, 401, 200, 200]
    assert "secret" not in caplog.text


PRIORITIES = {"alice": (0, 0, 0, 7), "bob": (-2, -2, 0, 7), "carol": (3, 3, 3, 7), None: (-5, -2, 0, 7)}
"""By key, what becomes of -5, -2, 0 and 7."""


def test_a_client_puts_its_requests_behind_others_but_not_before(tmp_path: Path, smol: Tokenizer) -> None:
    """Of every route that has the field. Without keys anybody may set any."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}),
    ]
    file = key_file(tmp_path, named("alice"), named("bob", priority=-2), named("carol", priority=3))
    cases: list[tuple[tuple[str | None, ...], dict[str, Any]]] = [
        (("alice", "bob", "carol"), {"api_keys_file": file}),
        ((None,), {}),
    ]
    for names, flags in cases:
        with running(smol, **flags) as server:
            for name in names:
                for path, body in bodies:
                    server.engine.received.clear()
                    for asked in (-5, -2, 0, 7):
                        reply = server.post(path, {**body, "priority": asked}, authorization=f"Bearer {name}-secret")
                        assert reply.status_code == 200
                    assert tuple(submit.priority for submit in server.engine.submits()) == PRIORITIES[name], path


def test_answers_of_other_keys_are_not_found(tmp_path: Path, smol: Tokenizer) -> None:
    with running(smol, api_keys_file=key_file(tmp_path, named("alice"), named("bob"))) as server:
        alice, bob = ({"authorization": f"Bearer {name}-secret"} for name in ("alice", "bob"))
        id = server.post("/v1/responses", {"input": "hi"}, **alice).json()["id"]
        assert server.client.get(f"/v1/responses/{id}", headers=alice).status_code == 200
        assert server.client.get(f"/v1/responses/{id}", headers=bob).status_code == 404


def test_sighup(tmp_path: Path) -> None:
    """Streams and settings stay as they are; what the file says counts from now on."""
    file = key_file(tmp_path, named("alice"))

    def status(url: str, name: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {name}-secret"}).status_code

    with daemon("--api-keys-file", str(file)) as server:
        assert (status(server.url, "alice"), status(server.url, "bob")) == (200, 401)
        key_file(tmp_path, named("bob"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status(server.url, "bob") == 200, 5)
        assert status(server.url, "alice") == 401
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "secret" not in server.log()
