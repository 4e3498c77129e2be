from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion

from model.tokenizer import Tokenizer
from scheduler.messages import Submit
from tests.server.running import CHAT, COMPLETIONS, MODEL, Running, running

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def parts(chunks: list[Any], index: int = 0) -> list[Any]:
    """The choices of one index, over all chunks."""
    assert chunks[-1] == "[DONE]"
    assert chunks.count("[DONE]") == 1
    return [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]


def text(chunks: list[Any], index: int = 0) -> str:
    return "".join(part["text"] for part in parts(chunks, index))


def test_a_whole_answer(server: Running, smol: Tokenizer) -> None:
    reply = server.complete(max_tokens=5, model=MODEL)
    body = reply.json()
    Completion.model_validate(body, strict=True)
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == smol.decode(server.engine.reply[:5])
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_says_the_same(server: Running) -> None:
    whole = server.complete(max_tokens=9).json()["choices"][0]
    chunks = server.stream(COMPLETIONS, prompt="Once", max_tokens=9)
    assert text(chunks) == whole["text"]
    finishes = [part["finish_reason"] for part in parts(chunks)]
    assert finishes == [None] * (len(finishes) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    for key in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({str(chunk[key]) for chunk in chunks[:-1]}) == 1


def test_another_number_type_is_another_fingerprint(smol: Tokenizer) -> None:
    """Of the weights or of the keys and values: the same request may get another text."""
    found = set()
    for quantization in (None, "int8", "int4"):
        with running(smol, quantization=quantization) as server:
            found.add(server.complete().json()["system_fingerprint"])
            assert "-kv-" in server.service.fingerprint
    assert len(found) == 3


@pytest.mark.parametrize(("path", "given"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})])
def test_a_stream_of_more_than_a_second_has_one_date(server: Running, path: str, given: dict[str, Any]) -> None:
    server.engine.interval = 0.06
    began = int(time.time())
    *chunks, _ = server.stream(path, **given, max_tokens=20)
    assert int(time.time()) > began
    assert {chunk["created"] for chunk in chunks} == {began}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_stream_is_plain_server_sent_events(server: Running) -> None:
    reply = server.complete(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in reply.headers
    assert "\r" not in reply.text
    assert all(line.startswith("data: ") for line in reply.text.splitlines() if line)


def test_usage_comes_when_asked_for(server: Running) -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    *chunks, last, done = server.stream(COMPLETIONS, prompt="Once", max_tokens=4, n=2, stream_options=options)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == server.complete(n=2).json()["usage"]


def test_usage_in_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = server.stream(COMPLETIONS, prompt="Once", max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4


def test_choices_of_several_prompts(server: Running, smol: Tokenizer) -> None:
    """Choice p * n + i is sequence i of prompt p; prompts are counted once each, whatever n."""
    body = server.complete(prompt=["one", "two", "three"], n=2, echo=True).json()
    said = smol.decode(server.engine.reply[:4])
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == [p + said for p in ("one", "two", "three") for _ in "ab"]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 24
    chunks = server.stream(COMPLETIONS, prompt=["one", "two", "three"], n=2, echo=True, max_tokens=4)
    assert [text(chunks, i) for i in range(6)] == [choice["text"] for choice in body["choices"]]
    assert all(len([p for p in parts(chunks, i) if p["finish_reason"]]) == 1 for i in range(6))


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], "abc", ["abc"]])
def test_shapes_of_prompts(server: Running, smol: Tokenizer, prompt: Any) -> None:
    server.complete(prompt=prompt)
    expected = [5, 6, 7] if prompt[0] in (5, [5, 6, 7]) else smol.encode("abc", add_special_tokens=True)
    assert server.engine.submits()[-1].prompt_ids == expected


def test_echo_with_logprobs_and_no_generation(server: Running) -> None:
    choice = server.complete(prompt="Your answer: Yes", max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "Your answer: Yes"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len({len(column) for column in logprobs.values()}) == 1


def test_echo_offsets_go_on_over_chunks(server: Running) -> None:
    fields = {"prompt": "1. Carol has 20", "echo": True, "logprobs": 1, "max_tokens": 5}
    whole = server.complete(**fields).json()["choices"][0]
    streamed = parts(server.stream(COMPLETIONS, **fields))
    offsets = [offset for part in streamed if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    assert "".join(part["text"] for part in streamed) == whole["text"]


def test_a_stop_string_ends_it_and_aborts_the_sequence(server: Running, smol: Tokenizer) -> None:
    stop = smol.decode(server.engine.reply[3:5])
    choice = server.complete(max_tokens=100, stop=stop).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == smol.decode(server.engine.reply[:3])
    server.engine.wait_for(lambda engine: engine.aborts() != [])


def test_the_end_token_is_no_text(server: Running, smol: Tokenizer) -> None:
    (end,) = smol.eos_ids
    server.engine.reply = [1000, 1001, end]
    choice = server.complete(max_tokens=10).json()["choices"][0]
    assert choice["text"] == smol.decode([1000, 1001])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert end in server.engine.submits()[-1].params.stop_token_ids
    server.complete(max_tokens=3, ignore_eos=True)
    assert server.engine.submits()[-1].params.stop_token_ids == ()


def test_token_ids_come_back(server: Running, smol: Tokenizer) -> None:
    choice = server.complete(return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == server.engine.reply[:4]
    assert choice["prompt_token_ids"] == smol.encode("Once", add_special_tokens=True)
    streamed = parts(server.stream(COMPLETIONS, prompt="Once", max_tokens=4, return_token_ids=True))
    assert [id for part in streamed for id in part["token_ids"]] == choice["token_ids"]


def test_logprobs_name_tokens_by_id_where_asked_to(server: Running) -> None:
    fields = {"prompt": "Once", "max_tokens": 4, "logprobs": 2, "return_tokens_as_token_ids": True}
    names = [f"token_id:{id}" for id in server.engine.reply[:4]]
    whole = server.complete(**fields).json()["choices"][0]["logprobs"]
    streamed = [part["logprobs"] for part in parts(server.stream(COMPLETIONS, **fields)) if part["logprobs"]]
    assert whole["tokens"] == [name for logprobs in streamed for name in logprobs["tokens"]] == names
    assert list(whole["top_logprobs"][0]) == [names[0], f"token_id:{server.engine.reply[0] + 1}"]


def test_prompt_logprobs(server: Running) -> None:
    choice = server.complete(prompt=[5, 6, 7], prompt_logprobs=1).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in rest] == ["6", "7"]
    assert rest[0]["6"]["rank"] == 1


def submitted(server: Running, **fields: Any) -> Submit:
    reply = server.complete(**fields)
    assert reply.status_code == 200, reply.text
    return server.engine.submits()[-1]


def test_every_sampling_field_reaches_the_engine(server: Running, smol: Tokenizer) -> None:
    submit = submitted(
        server,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"5": 1, "6": -2.5},
        min_tokens=2,
        stop_token_ids=[40],
        allowed_token_ids=[1000, 1001, 1000],
        bad_words=["cat"],
        seed=11,
        logprobs=3,
        priority=-4,
        n=2,
    )
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, -0.3)
    assert params.logit_bias == {5: 1.0, 6: -2.5}
    assert params.min_tokens == 2
    assert set(params.stop_token_ids) == {40, *smol.eos_ids}
    assert params.allowed_token_ids == (1000, 1001)
    words = {tuple(smol.encode(word, add_special_tokens=False)) for word in ("cat", " cat")}
    assert set(params.bad_words) == words
    assert (params.seed, params.logprobs, submit.priority, submit.n) == (11, 3, -4, 2)


def test_masks_are_made_once_a_request_in_a_thread(
    server: Running, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[tuple[str, str]] = []
    encode = smol.encode

    def noting(text: str, **options: Any) -> list[int]:
        encoded.append((text, threading.current_thread().name[:11]))
        return encode(text, **options)

    monkeypatch.setattr(smol, "encode", noting)
    reply = server.complete(prompt=[[5], [6], [7]], bad_words=["cat"], allowed_token_ids=[1000, 1001])
    assert reply.status_code == 200
    assert encoded == [("cat", "octavo-text"), (" cat", "octavo-text")]
    params = [submit.params for submit in server.engine.submits()]
    assert len({(p.bad_words, p.allowed_token_ids, p.max_tokens) for p in params}) == 1
    assert len({p.seed for p in params}) == 3


def test_masks_times_prompts_are_bounded(server: Running) -> None:
    fields = {"allowed_token_ids": list(range(40_000))}
    error = server.complete(prompt=[[5]] * 27, **fields).json()["error"]
    assert (error["param"], "1048576" in error["message"]) == ("prompt", True)
    assert server.complete(prompt=[[5]] * 2, **fields).status_code == 200


PROMPT = [5] * 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20, "n": 50}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": [PROMPT] * 50}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 50}, "logprobs"),
        ({"logprobs": 9, "echo": True, "stream": True, "n": 105}, "logprobs"),
        ({"return_token_ids": True, "n": 11, "prompt": [PROMPT] * 93, "echo": True}, "n"),
    ],
)
def test_what_an_answer_says_of_its_prompts_is_bounded(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.complete(**{"prompt": PROMPT, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], "1048576" in error["message"]) == (param, True)
    assert server.engine.submits() == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_made_off_the_event_loop(
    server: Running, smol: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    loop = server.call(threading.get_ident)
    spelled: list[bool] = []
    token_bytes = smol.token_bytes

    def noting(token: int) -> bytes:
        if token == 5:
            spelled.append(threading.get_ident() == loop)
        return token_bytes(token)

    monkeypatch.setattr(smol, "token_bytes", noting)
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2}
    told = parts(server.stream(COMPLETIONS, **fields)) if stream else server.complete(**fields).json()["choices"]
    names = [name for part in told for name in part["logprobs"]["tokens"]]
    values = [value for part in told for value in part["logprobs"]["token_logprobs"]]
    assert "".join(names) == "".join(part["text"] for part in told) == smol.decode([*PROMPT, *server.engine.reply[:2]])
    assert values == [None, *[-0.5] * 1001]
    assert spelled
    assert not any(spelled)


NULLS = dict.fromkeys(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logit_bias", "logprobs", "echo", "stream"),
        *("stream_options", "user", "suffix", "best_of", "stop_token_ids", "ignore_eos", "min_tokens", "model"),
    )
)
NEUTRAL: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": -1},
    {"top_p": 1},
    {"min_p": 0},
    {"max_tokens": 4.0},
    NULLS,
]


@pytest.mark.parametrize(
    "fields", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"max_tokens": 4.0}, NULLS]
)
def test_neutral_values_are_as_absent(server: Running, fields: dict[str, Any]) -> None:
    plain, neutral = submitted(server, seed=1), submitted(server, **fields | {"seed": 1})
    assert neutral.params == plain.params


def test_seeds(server: Running) -> None:
    assert submitted(server, seed=5).params.seed == 5
    drawn = {submitted(server, **fields).params.seed for fields in ({}, {}, {"seed": -1}, {"seed": None})}
    assert len(drawn) == 4


def test_default_and_limits_of_max_tokens(server: Running) -> None:
    server.post(COMPLETIONS, {"prompt": "Once"})
    assert server.engine.submits()[-1].params.max_tokens == 16
    server.post(COMPLETIONS, {"prompt": "Once", "max_tokens": None})
    assert server.engine.submits()[-1].params.max_tokens == 16
    error = server.complete(prompt=[5] * 100, max_tokens=1000).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert error["max_model_len"] == 1024
    assert server.complete(prompt=[5] * 1020, max_tokens=4).status_code == 200
    assert server.complete(prompt=[5] * 1024, max_tokens=1).status_code == 400


def test_truncation_when_asked_for(server: Running) -> None:
    ids = list(range(100, 2100))
    assert submitted(server, prompt=ids, truncate_prompt_tokens=3).prompt_ids == ids[-3:]
    assert submitted(server, prompt=ids, truncate_prompt_tokens=3, truncation_side="right").prompt_ids == ids[:3]
    assert submitted(server, prompt=ids, truncate_prompt_tokens=-1, max_tokens=4).prompt_ids == ids[-1020:]


def test_an_engine_error_is_a_500(server: Running) -> None:
    server.engine.fail_with = "its logits are not finite"
    reply = server.complete()
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    chunks = server.stream(COMPLETIONS, prompt="x")
    assert chunks[-2]["error"]["message"] == reply.json()["error"]["message"] == "its logits are not finite"
    assert chunks[-1] == "[DONE]"


def test_the_sdk_streams(server: Running, sdk: openai.OpenAI, smol: Tokenizer) -> None:
    stream = sdk.completions.create(model=MODEL, prompt="Once", max_tokens=12, stream=True, logprobs=1)
    said = "".join(chunk.choices[0].text for chunk in stream)
    assert said == smol.decode(server.engine.reply[:12])


def test_the_sdk_raises_our_errors(server: Running, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=MODEL, prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    server.engine.fail_with = "broken"
    with pytest.raises(openai.APIError, match="broken"):
        list(sdk.completions.create(model=MODEL, prompt="x", stream=True))
