"""Stop strings, logprobs and counts of an answer that begins with reasoning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsing.reasoning import REASONING_FORMATS
from tests.server.played import END, STOP, Engine, collect, play, sum_up

THINK = REASONING_FORMATS["think"]


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("text", "stop", "inside", "sent"),
    [
        ("<think>a stop b</think>c stop d", "stop", False, "<think>a stop b</think>c "),
        ("a stop b</think>c stop d", "stop", True, "a stop b</think>c "),
        ("a stop b", "stop", False, "a "),
        ("<think>a</think>b</think>", "</think>", False, "<think>a</think>b"),
        ("<think>a", "<th", False, "<think>a"),
        ("<thing>", "<th", False, ""),
        ("<think>a</think>nk>", "k>n", False, "<think>a</think>nk>"),
        ("<think>a</thi", "i", False, "<think>a</thi"),
        (" <thi", "i", False, " <th"),
    ],
)
@given(cuts=st.lists(st.integers(0, 40), max_size=8))
def test_stop_strings_count_behind_the_reasoning(
    text: str, stop: str, inside: bool, sent: str, cuts: list[int]
) -> None:
    """Wherever the tokens end, whole and streamed; logprobs cover what was sent."""
    options: dict[str, Any] = {"stop": (stop,), "reasoning": THINK, "inside": inside, "logprobs": 0}
    for pieces in (cut(text, cuts), list(text)):
        whole = collect(pieces, **options)
        assert (whole.text, whole.finish_reason) == (sent, "length" if sent == text else "stop")
        assert "".join(entry.text for entry in whole.logprobs or ()) == sent
        assert sum_up(play(pieces, **options)) == whole


@pytest.mark.parametrize(
    ("pieces", "inside", "tokens"),
    [
        (["<think>", "a", " b", "</think>", "c"], False, 4),
        (["<th", "ink>a", "</th", "ink>c", "d"], False, 4),
        (["a", "</think>", "c"], True, 2),
        (["a", "b"], False, 0),
        (["<thi", "ng>"], False, 0),
        (["<think>", "a", "</th"], False, 3),
        ([" ", "<think>", "a"], False, 3),
    ],
)
def test_tokens_of_the_reasoning(pieces: list[str], inside: bool, tokens: int) -> None:
    engine = Engine(pieces, reasoning=THINK, inside=inside)
    for token in range(1, len(pieces) + 1):
        engine.step(token)
    engine.step(END, STOP)
    # Where the end token comes inside the reasoning, it is of it.
    assert engine.stream.reasoning_tokens == tokens + (tokens == len(pieces))
    assert engine.stream.usage.completion_tokens == len(pieces) + 1


def test_markers_that_are_special_tokens_are_shown() -> None:
    """END is special; here it is a marker too."""
    engine = Engine(["a", "b"], shown=frozenset({END}), logprobs=0)
    for token in (1, END, 2):
        engine.step(token)
    engine.step(1, STOP)
    (event,) = [choice.take() for choice in engine.stream._choices]
    assert event.text == "a<end>b"
    assert [entry.text for entry in event.logprobs or ()] == ["a", "<end>", "b"]
