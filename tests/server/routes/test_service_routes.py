from __future__ import annotations

import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import openai
import pytest

from model.tokenizer import Tokenizer
from tests.server.running import MODEL, Running, running


def test_models(server: Running) -> None:
    body = server.client.get("/v1/models").json()
    assert [card["id"] for card in body["data"]] == [MODEL, "alias"]
    assert body["data"][0]["max_model_len"] == 1024
    size = body["data"][0]["vocab_size"]
    assert server.complete(prompt=[size - 1]).status_code == 200
    assert f"(0 to {size - 1})" in server.complete(prompt=[size]).json()["error"]["message"]
    for id in (MODEL, MODEL.replace("/", "%2F"), MODEL.replace("/", "%2f")):
        assert server.client.get(f"/v1/models/{id}").json() == body["data"][0]
    assert server.client.get("/v1/models/").json() == body
    error = server.client.get("/v1/models/nope").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == f"The model 'nope' does not exist; this server has {MODEL!r}."


def test_the_sdk_finds_a_model_whose_id_has_a_slash(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve(MODEL).id == MODEL
        assert [model.id for model in client.models.list()] == [MODEL, "alias"]


def test_aliases_answer_under_their_name(server: Running) -> None:
    assert server.complete(model="alias").json()["model"] == "alias"
    assert server.complete().json()["model"] == MODEL


def test_tokenize_in_three_shapes(server: Running, smol: Tokenizer) -> None:
    ids = smol.encode("hello world", add_special_tokens=True)
    vllm = server.post("/tokenize", {"prompt": "hello world", "return_token_strs": True}).json()
    assert vllm == {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": ["hello", " world"]}
    assert server.post("/tokenize", {"content": "hello world"}).json() == {"tokens": ids}
    pieces = server.post("/tokenize", {"content": "hello world", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": ids[0], "piece": "hello"}, {"id": ids[1], "piece": " world"}]
    spans = server.post("/tokenize", {"inputs": "hello world"}).json()
    assert [(span["start"], span["stop"]) for span in spans] == [(0, 5), (5, 11)]


def test_tokenize_a_conversation(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = server.post("/tokenize", {"messages": messages}).json()
    server.chat(messages=messages)
    assert body["tokens"] == server.engine.submits()[-1].prompt_ids
    assert body["count"] == len(body["tokens"])


def test_tokens_that_are_no_text_by_themselves(server: Running, smol: Tokenizer) -> None:
    """A character in several tokens: TGI's spans add up to the text, llama.cpp's pieces are bytes."""
    text = "a 🦩 b"
    spans = server.post("/tokenize", {"inputs": text}).json()
    assert [spans[0]["start"], spans[-1]["stop"]] == [0, len(text)]
    assert all(one["stop"] == two["start"] for one, two in pairwise(spans))
    assert all(text[span["start"] : span["stop"]] in (span["text"], "", " ", "🦩") for span in spans)
    pieces = [
        token["piece"] for token in server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    ]
    assert any(isinstance(piece, list) for piece in pieces)
    data = b"".join(bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces)
    assert data.decode() == text


def test_the_prompt_of_a_conversation(server: Running, smol: Tokenizer) -> None:
    fields: Any = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]}
    text = server.post("/apply-template", fields).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    server.chat(**fields)
    ids = server.engine.submits()[-1].prompt_ids
    assert smol.decode(ids, skip_special=False) == text
    body = server.post("/v1/chat/completions/input_tokens", fields).json()
    assert body == {"object": "chat.completion.input_tokens", "input_tokens": len(ids)}
    assert server.post("/apply-template", {"messages": []}).json()["error"]["param"] == "messages"


def test_detokenize(server: Running, smol: Tokenizer) -> None:
    ids = smol.encode("hello wörld", add_special_tokens=True)
    for body in ({"tokens": ids}, {"ids": ids}):
        reply = server.post("/detokenize", body).json()
        assert reply["prompt"] == reply["content"] == "hello wörld"


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"inputs": "abc"}, "model.tokenizer.Tokenizer.token_text"),
        ("/tokenize", {"prompt": "abc"}, "model.tokenizer.Tokenizer.encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "server.template.ChatTemplate.render"),
        ("/detokenize", {"tokens": [5, 6]}, "server.prompts.decode"),
    ],
)
def test_work_on_texts_has_a_slot_and_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, work: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    threads: set[str] = set()
    room, _, name = work.rpartition(".")
    original = getattr(pkgutil.resolve_name(room), name)

    def slow(*given: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name[:11])
        begun.set()
        assert go_on.wait(5)
        return original(*given, **options)

    monkeypatch.setattr(work, slow)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, path, body)
        assert begun.wait(5)
        assert threads == {"octavo-text"}
        assert (server.service.admission.sequences, server.service.admission.requests) == (1, 1)
        assert server.client.get("/health").status_code == 200
        go_on.set()
        assert reply.result(5).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        *(
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}], name: "a"}, name)
            for name in ("prompt", "content", "inputs")
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"ids": [5] * 1_000_001}, "ids"),
        *(("/tokenize", {name: "x" * (2**20 + 1)}, name) for name in ("prompt", "content", "inputs")),
    ],
)
def test_faults(server: Running, path: str, body: Any, param: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_version(server: Running) -> None:
    assert set(server.client.get("/version").json()) == {"version"}


@pytest.mark.parametrize("path", ["/health", "/healthz", "/livez", "/ping", "/ready", "/readyz"])
def test_probes_of_a_server_that_serves(server: Running, path: str) -> None:
    assert server.client.get(path).json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_take_head(server: Running, path: str) -> None:
    assert server.client.head(path).status_code == 200


def test_while_the_model_is_loaded(smol: Tokenizer) -> None:
    def slow(engine: Any) -> None:
        engine.load_seconds = 1.0

    with running(smol, slow) as server:
        for path in ("/health", "/ready"):
            reply = server.client.get(path)
            assert (reply.status_code, reply.json()["status"]) == (503, "loading")
        refused = server.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert int(refused.headers["retry-after"]) > 0
        assert server.client.get("/v1/models").status_code == 200
        server.wait(lambda: server.client.get("/ready").status_code == 200)
        assert server.complete().status_code == 200


def test_a_dead_engine(smol: Tokenizer) -> None:
    """Whoever is in the middle is told; new requests and the probes get 503; no gauge says that anything runs."""
    with running(smol) as server, server.client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        server.engine.die()
        data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert '"type":"server_error"' in data[-2]
        for path in ("/health", "/ready"):
            assert (server.client.get(path).status_code, server.client.get(path).json()["status"]) == (503, "dead")
        assert server.complete().status_code == 503
        assert server.metric("octavo_requests_running") == 0
        assert server.metric("octavo_engine_up") == 0
        assert server.metric("octavo_requests_total", finish_reason="error") == 1


LONG = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def test_a_hung_engine(server: Running) -> None:
    """Silent with work pending is unhealthy; idle is not, and a step brings health back."""
    server.service.client.patience = 0.2
    server.engine.paused.set()
    assert server.client.get("/health").status_code == 200
    with server.client.stream("POST", "/v1/completions", json=LONG):
        server.wait(lambda: server.client.get("/health").json()["status"] == "stalled")
        assert server.client.get("/ready").status_code == 503
        server.engine.paused.clear()
        server.wait(lambda: server.client.get("/health").status_code == 200)
