"""Beam search over HTTP: what it goes together with, and what the answer says of the beams."""

from __future__ import annotations

import pytest

from scheduler.messages import BeamSearch
from tests.server.running import COMPLETIONS, Running


def test_beams_are_whole_answers_of_the_models_own_distribution(server: Running) -> None:
    for fields in (
        {"echo": True},
        {"stop": "x"},
        {"temperature": 0.5},
        {"logit_bias": {"5": 1}},
        {"guided_regex": "a"},
    ):
        reply = server.complete(use_beam_search=True, **fields)
        assert reply.status_code == 400
        assert "use_beam_search" in reply.json()["error"]["message"]
    assert server.complete(use_beam_search=True, n=17).json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"length_penalty": 2}, "length_penalty"),
        ({"beam_width": 2}, "beam_width"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 17}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 9}, "beam_width"),
        ({"use_beam_search": True, "n": 9}, "n"),
        ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
    ],
)
def test_what_does_not_fit_is_named(server: Running, fields: dict[str, object], param: str) -> None:
    """The server runs eight sequences at once."""
    reply = server.complete(**fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].partition(".")[0] == param


def test_the_engine_is_told(server: Running) -> None:
    fields = {"beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    assert server.complete(use_beam_search=True, n=2, prompt=["a", "b"], **fields).status_code == 200
    for submit in server.engine.submits():
        assert submit.search == BeamSearch(width=4, length_penalty=0.5, early_stopping="never")
        assert submit.n == 2


def test_a_stream_of_beams_says_the_same(server: Running) -> None:
    """Each comes whole, in one chunk: until the end of the search none is known."""
    first = server.engine.reply[0]
    fields = {"prompt": ["a", "b"], "n": 2, "use_beam_search": True, "max_tokens": 4, "logprobs": 1}
    fields |= {"stop_token_ids": [first + 1], "return_token_ids": True}
    whole = server.complete(**fields).json()
    *chunks, last, done = server.stream(COMPLETIONS, **fields, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sorted(choices, key=lambda choice: choice["index"]) == whole["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    assert (last["usage"], done) == (whole["usage"], "[DONE]")


def test_a_search_that_fails_leaves_nothing(server: Running) -> None:
    server.engine.fail_with = "broken"
    assert server.complete(use_beam_search=True, n=2).status_code == 500


def test_beams_end_with_the_end_token(server: Running) -> None:
    """The fake engine's candidates are a token and its neighbours."""
    first = server.engine.reply[0]
    body = server.complete(use_beam_search=True, n=2, stop_token_ids=[first + 1], return_token_ids=True).json()
    ends = {choice["finish_reason"] for choice in body["choices"]}
    assert "stop" in ends
    for choice in body["choices"]:
        assert first + 1 not in choice["token_ids"]
        assert choice["stop_reason"] == (first + 1 if choice["finish_reason"] == "stop" else None)


def test_beams_come_best_first_with_their_logprobs(server: Running) -> None:
    """Every step the likeliest token has the logprob -0.5, the next one -1.5."""
    reply = server.complete(use_beam_search=True, n=3, max_tokens=4, logprobs=1, ignore_eos=True)
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["cumulative_logprob"] for choice in choices] == pytest.approx([-2.0, -3.0, -3.0])
    for choice in choices:
        assert choice["finish_reason"] == "length"
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(choice["cumulative_logprob"])
        assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"])
    assert reply.json()["usage"]["completion_tokens"] == 12
    plain = server.complete(use_beam_search=True, n=2).json()["choices"][0]
    assert plain["logprobs"] is None
    assert plain["cumulative_logprob"] < 0
