"""Whatever a request asks for, its stream adds up to its whole answer: texts, ends, logprobs, ids and counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from tests.fuzzing import fuzz
from tests.server.running import CHAT, COMPLETIONS, Running

TEXTS = [
    "Once, a 😀 met 👨‍👩‍👧.",
    "ABABABAC\n\n the end",
    "e\u0301 家庭 a\ufffdb",
    "  blanks   and\ttabs ",
    "<|im_end|> as text",
]
STOPS = ["A", "ABAC", "\u200d", "met", "\n\n", "\ufffd", "庭 a", "the end, and more", " "]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(5, 30),
    "min_tokens": st.integers(0, 5),
    "stop": st.lists(st.sampled_from(STOPS), max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "stream_interval": st.sampled_from([1, 3, 50]),
}
ANY = st.fixed_dictionaries({}, optional=FIELDS)
OF_COMPLETIONS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["x", ["é😀", "two"], [[5, 6], [222]]])},
    optional={"echo": st.booleans(), "logprobs": st.integers(0, 2), "max_tokens": st.integers(0, 30)},
)
OF_CHATS = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}])},
    optional={"echo": st.booleans(), "logprobs": st.just(True), "continue_final_message": st.booleans()},
)


@fuzz(40)
@given(text=st.sampled_from(TEXTS), ended=st.booleans(), fields=ANY, more=OF_COMPLETIONS)
@example(TEXTS[0], True, {"stop": ["\u200d"], "n": 2}, {"prompt": [[5, 6], [222]], "echo": True, "logprobs": 1})
def test_completions(
    shared: Running, smol: Tokenizer, text: str, ended: bool, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    body = fields | more
    if body.get("echo"):
        body["stop"] = body.get("stop", [])[:1]
    body["min_tokens"] = min(body.get("min_tokens", 0), body.get("max_tokens", 16))
    compare(shared, smol, COMPLETIONS, text, ended, body)


@fuzz(40)
@given(text=st.sampled_from(TEXTS), ended=st.booleans(), fields=ANY, more=OF_CHATS)
def test_chats(
    shared: Running, smol: Tokenizer, text: str, ended: bool, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    compare(shared, smol, CHAT, text, ended, {"max_tokens": 30} | fields | more)


def compare(server: Running, smol: Tokenizer, path: str, text: str, ended: bool, body: dict[str, Any]) -> None:
    """The model says `text`, and then ends, or begins again."""
    ids = smol.encode(text, add_special_tokens=False, allow_special=False)
    server.engine.reply = [*ids, *sorted(smol.eos_ids)[:1]] if ended else ids
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    *chunks, usage, done = server.stream(path, **body, stream_options={"include_usage": True})
    server.engine.received.clear()
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert added_up(parts) == added_up([choice])


def added_up(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What choices say together."""
    texts = [part.get("delta") or part.get("message") or {"content": part.get("text")} for part in parts]
    scores: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            scores.setdefault(name, []).extend(values or ())
    return {
        "text": "".join(text.get("content") or "" for text in texts),
        "token_ids": [token for part in parts for token in part.get("token_ids", ())],
        "logprobs": {name: values for name, values in scores.items() if values},
        "end": (parts[-1]["finish_reason"], parts[-1]["stop_reason"]),
    }


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_the_vocabulary(server: Running, field: str) -> None:
    for id in (49152, 2**31 - 1):
        for path in (COMPLETIONS, CHAT):
            more = {"prompt": "x", "logprobs": 1} if path == COMPLETIONS else {"logprobs": True}
            value: Any = {str(id): 1} if field == "logit_bias" else [5, id]
            body = {"messages": [{"role": "user", "content": "hi"}], **more, field: value}
            if path == COMPLETIONS:
                del body["messages"]
            reply = server.post(path, body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert server.engine.submits() == []
