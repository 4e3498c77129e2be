"""Which beams go on, and which have ended."""

from __future__ import annotations

from server.beam import Beam, advanced
from server.logprobs import Alternative
from tests.server.running import Running


def others(**logprobs: float) -> list[Alternative]:
    return [Alternative(int(name[1:]), "", b"", value) for name, value in logprobs.items()]


def test_the_likeliest_of_all_beams_go_on() -> None:
    beams = [Beam((1,), -1.0), Beam((2,), -1.5)]
    live, ended = advanced(beams, [others(t5=-2.0, t6=-3.0), others(t5=-0.1, t7=-9.0)], 2, frozenset())
    assert [(beam.tokens, round(beam.logprob, 6)) for beam in live] == [((2, 5), -1.6), ((1, 5), -3.0)]
    assert ended == []


def test_an_end_makes_room_for_another() -> None:
    beams = [Beam((1,), -1.0)]
    live, ended = advanced(beams, [others(t2=-0.1, t5=-2.0, t6=-3.0, t7=-4.0)], 2, frozenset({2}))
    assert [beam.tokens for beam in live] == [(1, 5), (1, 6)]
    assert ended == [Beam((1,), -1.1, True, 2)]
    assert ended[0].score(1.0) == -1.1 / 2


def test_beams_are_whole_answers_of_the_models_own_distribution(server: Running) -> None:
    for fields in (
        {"stream": True},
        {"stop": "x"},
        {"temperature": 0.5},
        {"logit_bias": {"5": 1}},
        {"guided_regex": "a"},
    ):
        reply = server.complete(use_beam_search=True, **fields)
        assert reply.status_code == 400
        assert "use_beam_search" in reply.json()["error"]["message"]
    assert server.complete(use_beam_search=True, n=17).json()["error"]["param"] == "n"
    assert server.complete(length_penalty=2).json()["error"]["param"] == "length_penalty"
    long = {"prompt": [5] * 500, "max_tokens": 500, "n": 16}
    assert server.complete(use_beam_search=True, **long).json()["error"]["param"] == "max_tokens"


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
