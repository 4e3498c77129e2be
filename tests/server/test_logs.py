"""One line a request, with fields: text for people, JSON for machines; no prompt unless it was asked for."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from model.tokenizer import Tokenizer
from server.admission import Admission
from server.logs import JsonLines, TextLines
from server.metrics import Metrics
from server.middleware import MAX_LOGGED_BODY, Requests
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running
from tests.server.test_daemon import daemon

ACCESS = "octavo.access"


def record(message: str, fields: dict[str, Any], **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("octavo", logging.INFO, "f.py", 1, message, (fields,), None)
    made.fields = fields
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_text_appends_what_the_message_does_not_name() -> None:
    fields = {"status": 200, "id": "a b", "key": 'x"y\n=', "empty": "", "ms": 1.5, "name": "é"}
    line = TextLines().format(record("status %(status)d", fields))
    assert line.endswith(r'status 200 id="a b" key="x\"y\n=" empty="" ms=1.5 name="\u00e9"')
    assert "\n" not in line


def test_json_has_fields() -> None:
    line = JsonLines().format(record("status %(status)d", {"status": 200, "id": "\u2028\ud83d\n", "reasons": ["stop"]}))
    assert "\n" not in line
    assert line.isascii()
    read = json.loads(line)
    assert read.pop("time").endswith("Z")
    assert read == {
        "level": "info",
        "logger": "octavo",
        "message": "status 200",
        "status": 200,
        "id": "\u2028\ud83d\n",
        "reasons": ["stop"],
    }


def test_a_traceback_is_a_field_of_one_line() -> None:
    try:
        raise ValueError("no\nline")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    made = record("failed", {"id": "x"}, exc_info=info, args=())
    line = JsonLines().format(made)
    assert "\n" not in line
    assert "ValueError: no\nline" in json.loads(line)["exception"]
    assert "failed id=x\nTraceback" in TextLines().format(made)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger=ACCESS)
    return caplog


def fields_of(server: Running, lines: pytest.LogCaptureFixture, id: str) -> dict[str, Any]:
    """Of the one line about this request; it comes after the answer."""

    def found() -> list[dict[str, Any]]:
        all = [made.__dict__["fields"] for made in lines.records if made.name == ACCESS]
        return [fields for fields in all if fields["request_id"] == id]

    server.wait(lambda: bool(found()))
    (fields,) = found()
    return fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_request_was_and_took(server: Running, lines: pytest.LogCaptureFixture, path: str, stream: bool) -> None:
    body = {"model": "alias", "max_tokens": 3, "n": 2, "ignore_eos": True, "stream": stream}
    body |= {"prompt": "Once upon"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Once upon"}]}
    answer = server.post(path, body, **{"x-request-id": "mine"})
    assert answer.status_code == 200
    fields = fields_of(server, lines, "mine")
    (submit,) = server.engine.submits()
    assert {name: fields.pop(name) for name in ("duration_ms", "queue_ms", "ttft_ms")}
    assert fields == {
        "request_id": "mine",
        "method": "POST",
        "path": path,
        "route": path,
        "status": 200,
        "model": "alias",
        "prompt_tokens": len(submit.prompt_ids),
        "cached_tokens": 0,
        "completion_tokens": 6,
        "finish_reason": "length",
    }


def test_times_are_in_order(server: Running, lines: pytest.LogCaptureFixture) -> None:
    server.engine.interval = 0.02
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "ignore_eos": True}, **{"x-request-id": "t"})
    fields = fields_of(server, lines, "t")
    assert 0 <= fields["queue_ms"] <= fields["ttft_ms"] <= fields["duration_ms"] < 5000
    assert fields["duration_ms"] - fields["ttft_ms"] > 40


def test_how_requests_fail(server: Running, lines: pytest.LogCaptureFixture) -> None:
    server.post(COMPLETIONS, {"prompt": "x", "temperature": -1}, **{"x-request-id": "bad"})
    refused = fields_of(server, lines, "bad")
    assert (refused["status"], refused["route"]) == (400, COMPLETIONS)
    assert not {"model", "prompt_tokens", "finish_reason"} & set(refused)
    server.client.get("/no/%0Asuch", headers={"x-request-id": "lost"})
    lost = fields_of(server, lines, "lost")
    assert (lost["status"], lost["path"]) == (404, r"/no/\nsuch")
    assert "route" not in lost
    server.engine.fail_with = "no more"
    for stream, status in ((False, 500), (True, 200)):
        id = f"failed-{stream}"
        server.post(COMPLETIONS, {"prompt": "x", "stream": stream}, **{"x-request-id": id})
        failed = fields_of(server, lines, id)
        assert (failed["status"], failed["finish_reason"], failed["error"]) == (status, "error", "engine_error")


def test_a_client_that_leaves(server: Running, lines: pytest.LogCaptureFixture) -> None:
    server.engine.interval = 0.02
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": "left"}) as stream:
        assert next(stream.iter_lines())
    fields = fields_of(server, lines, "left")
    assert fields["status"] == 499
    assert fields["finish_reason"] == "abort"
    assert 0 < fields["completion_tokens"] < 500


def test_probes_make_no_line(server: Running, lines: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics"):
        server.client.get(path, headers={"x-request-id": "probe"})
    server.client.get("/version", headers={"x-request-id": "seen"})
    assert fields_of(server, lines, "seen")["route"] == "/version"
    assert not [made for made in lines.records if made.__dict__["fields"]["request_id"] == "probe"]


def test_bodies_are_logged_only_where_asked_for(smol: Tokenizer, lines: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "my diary\n", "max_tokens": 1}
    with running(smol) as server:
        server.post(COMPLETIONS, body, **{"x-request-id": "private"})
        assert "request_body" not in fields_of(server, lines, "private")
    assert "diary" not in lines.text
    with running(smol, log_requests=True) as server:
        server.post(COMPLETIONS, body, **{"x-request-id": "shown"})
        assert json.loads(fields_of(server, lines, "shown")["request_body"]) == body
        server.post(COMPLETIONS, b'{"prompt": "\xff' + b"a" * 10_000, **{"x-request-id": "long"})
        shown = fields_of(server, lines, "long")["request_body"]
        assert shown == '{"prompt": "' + r"\xff" + "a" * (MAX_LOGGED_BODY - 13)
        server.client.get("/version", headers={"x-request-id": "none"})
        assert "request_body" not in fields_of(server, lines, "none")


async def test_the_name_of_the_key_not_the_key(lines: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["key_name"] = "alice"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: Any) -> Any:
        return {"type": "http.disconnect"}

    admission = Admission(1, 1, 1, lambda: 0)
    headers = [(b"authorization", b"Bearer very-secret")]
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": headers}
    await Requests(app, Metrics(), admission)(scope, nothing, nothing)
    (made,) = lines.records
    assert made.__dict__["fields"]["key"] == "alice"
    assert "secret" not in TextLines().format(made) + JsonLines().format(made)


def test_the_served_name_is_logged_not_the_clients_words(server: Running, lines: pytest.LogCaptureFixture) -> None:
    server.complete(model="no such model")
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "default"})
    assert fields_of(server, lines, "default")["model"] == MODEL
    assert "no such" not in lines.text


def test_every_line_of_a_server_is_an_object() -> None:
    with daemon("--log-format", "json", "--log-requests") as process:
        body = {"prompt": "my diary", "max_tokens": 2}
        assert httpx.post(process.url + COMPLETIONS, json=body, headers={"x-request-id": "mine"}).status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        read = [json.loads(line) for line in process.log().splitlines()]
    assert any(line["level"] == "warning" and "--log-requests" in line["message"] for line in read)
    (access,) = [line for line in read if line.get("request_id") == "mine"]
    assert access["message"].startswith(f"POST {COMPLETIONS} 200 ")
    assert (access["logger"], access["completion_tokens"]) == (ACCESS, 2)
    assert json.loads(access["request_body"]) == body
