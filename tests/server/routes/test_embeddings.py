from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from model.embedding import EmbeddingConfig, Pooling
from model.tokenizer import Tokenizer
from tests.server.fake_engine import HIDDEN, READY, vector
from tests.server.running import MODEL, Running, running

EMBEDDINGS = "/v1/embeddings"


def embed(server: Running, input: Any, **fields: Any) -> Any:
    reply = server.post(EMBEDDINGS, {"input": input, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def expected(ids: list[int], **changes: Any) -> list[float]:
    values: dict[str, Any] = {"kind": "mean", "size": HIDDEN, **changes}
    numbers: list[float] = np.frombuffer(vector(ids, Pooling(**values)), "<f4").tolist()
    return numbers


def test_the_shape_of_an_answer(server: Running, smol: Tokenizer) -> None:
    texts = ["hello world", "a"]
    body = embed(server, texts)
    CreateEmbeddingResponse.model_validate(body, strict=True)
    ids = [smol.encode(text, add_special_tokens=True) for text in texts]
    assert [entry["embedding"] for entry in body["data"]] == [expected(tokens) for tokens in ids]
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    count = sum(map(len, ids))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert sum(x * x for x in body["data"][0]["embedding"]) == pytest.approx(1)


def test_base64_holds_the_same_values(server: Running) -> None:
    floats = embed(server, "hello")["data"][0]["embedding"]
    assert embed(server, "hello", encoding_format="float")["data"][0]["embedding"] == floats
    text = embed(server, "hello", encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack(f"<{HIDDEN}f", base64.b64decode(text))) == floats


def test_the_sdk_asks_for_base64_and_gets_floats(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.embeddings.create(model=MODEL, input=["one", "two", "three"])
        assert [len(entry.embedding) for entry in reply.data] == [HIDDEN] * 3
        floats = client.embeddings.create(model=MODEL, input="two", encoding_format="float")
        assert reply.data[1].embedding == pytest.approx(floats.data[0].embedding)


@pytest.mark.parametrize("ids", [[[1, 2, 3], [4]], [[7]]])
def test_lists_of_ids(server: Running, ids: list[list[int]]) -> None:
    body = embed(server, ids)
    assert [entry["embedding"] for entry in body["data"]] == [expected(tokens) for tokens in ids]
    assert embed(server, ids[0])["data"][0] == body["data"][0]


def test_more_inputs_than_slots(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the engine in turn, never more at once than run, and come back in order."""
    client, admission = server.service.client, server.service.admission
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(client, "on_step", lambda step: seen.append((len(step.ids), admission.sequences)))
    before = len(server.engine.submits())
    counted = server.metric("octavo_requests_total", endpoint="embeddings", finish_reason="stop")
    body = embed(server, [[id] for id in range(1, 101)])
    assert [entry["embedding"] for entry in body["data"]] == [expected([id]) for id in range(1, 101)]
    assert len(server.engine.submits()) - before == 100
    server.wait(lambda: server.service.admission.sequences == 0)
    width = server.service.settings.max_num_seqs
    assert max(rows for rows, _ in seen) <= width
    assert {slots for _, slots in seen} == {width}
    after = server.metric("octavo_requests_total", endpoint="embeddings", finish_reason="stop")
    assert after - counted == 100


def test_inputs_that_wait_for_their_turn_are_not_late(smol: Tokenizer) -> None:
    """--queue-timeout is about a request that does not start."""
    with running(smol, queue_timeout=0.3, max_num_seqs=1) as server:
        server.engine.interval = 0.1
        assert len(embed(server, [[id] for id in range(1, 7)])["data"]) == 6


def test_a_raw_vector(server: Running) -> None:
    assert embed(server, [5, 6], normalize=False)["data"][0]["embedding"] == expected([5, 6], normalize=False)


def test_shorter_vectors_where_the_model_was_made_for_them(server: Running) -> None:
    assert embed(server, [5, 6], dimensions=4)["data"][0]["embedding"] == expected([5, 6], size=4)
    assert embed(server, [5, 6], dimensions=HIDDEN)["data"][0]["embedding"] == expected([5, 6])
    for size in (3, 9, 10**9):
        reply = server.post(EMBEDDINGS, {"input": "x", "dimensions": size})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")
        assert "8 or 4" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [5, 6]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [7, 8]),
        ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8]),
    ],
)
def test_truncation(server: Running, fields: dict[str, Any], kept: list[int]) -> None:
    assert embed(server, [5, 6, 7, 8], **fields)["data"][0]["embedding"] == expected(kept)


def test_the_whole_context_may_be_the_prompt(server: Running) -> None:
    assert embed(server, [5] * 1024)["usage"]["prompt_tokens"] == 1024
    reply = server.post(EMBEDDINGS, {"input": [5] * 1025})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert reply.json()["error"]["param"] == "input"
    assert embed(server, [5] * 2000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 1024


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a \ud83d"}, "input"),
        ({}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_faults(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.post(EMBEDDINGS, fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]


def test_bounds_of_an_answer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.routes.embeddings.MAX_NUMBERS", 2 * HIDDEN)
    monkeypatch.setattr("server.routes.embeddings.MAX_TOKENS", 5)
    assert len(embed(server, ["a", "b"])["data"]) == 2
    for input in (["a", "b", "c"], [[1, 2, 3], [4, 5, 6]]):
        assert server.post(EMBEDDINGS, {"input": input}).json()["error"]["param"] == "input"


def test_nulls_are_absent(server: Running) -> None:
    nulls = dict.fromkeys(("dimensions", "encoding_format", "user", "model", "normalize", "truncate_prompt_tokens"))
    assert embed(server, "a", **nulls) == embed(server, "a")


def test_a_model_that_gives_none(smol: Tokenizer) -> None:
    def mute(engine: Any) -> None:
        import msgspec

        refusing = EmbeddingConfig(hidden_size=8, refusal="its pooling (cls) is neither mean nor last")
        engine.ready = msgspec.structs.replace(READY, embedding=refusing)

    with running(smol, mute) as server:
        error = server.post(EMBEDDINGS, {"input": "a"}).json()["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_value")
        assert "cls" in error["message"]


def test_an_engine_that_fails(server: Running) -> None:
    server.engine.fail_with = "no"
    assert server.post(EMBEDDINGS, {"input": ["a", "b"]}).status_code == 500
    server.engine.fail_with = None
    assert embed(server, "a")["data"]
    server.wait(lambda: server.service.admission.sequences == 0)
