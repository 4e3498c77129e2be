"""Guesses against their definition, and what of them counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model.batch import BAD_LOGITS, NO_TOKEN, Row
from model.params import SamplingParams
from model.speculation import CATCH_UP, DEPTH, NgramIndex, agreed, positions

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def latest(tokens: list[int]) -> tuple[int, int]:
    """The definition of `find`."""
    for end in range(len(tokens) - 2, 0, -1):
        if tokens[end - 1 : end + 1] == tokens[-2:]:
            lengths = [n for n in range(2, DEPTH + 1) if tokens[max(end + 1 - n, 0) : end + 1] == tokens[-n:]]
            return end + 1, max(lengths)
    return 0, 0


@given(text=texts, asked=st.sets(st.integers(1, 60)))
def test_find_at_any_time(text: list[int], asked: set[int]) -> None:
    """Whether it was asked at every token or at none before must not matter."""
    tokens: list[int] = []
    index = NgramIndex(tokens)
    for token in text:
        tokens.append(token)
        if len(tokens) in asked:
            assert index.find() == latest(tokens)
    assert index.find() == latest(tokens)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    tokens = [*range(2 * CATCH_UP + 10), 3, 4]
    index = NgramIndex(tokens)
    assert [index.find() for _ in range(4)] == [(0, 0), (0, 0), (5, 2), (5, 2)]


def test_what_followed_is_proposed() -> None:
    index = NgramIndex([5, 1, 2, 3, 4, 9, 1, 2])
    assert index.find() == (3, 2)
    assert index.follow(3, 3) == [3, 4, 9]


def test_a_period_goes_on() -> None:
    index = NgramIndex([7, 1, 2, 3, 1, 2, 3])
    place, matched = index.find()
    assert (place, matched) == (4, 3)
    assert index.follow(place, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index.follow(place, 0) == []


def test_positions_stand_behind_each_guess() -> None:
    row = Row([1, 2, 3], 2, 2, 1, [1], SamplingParams(max_tokens=9, seed=0), index=4, draft=[8, 9])
    assert [p.tokens for p in positions(row)] == [[1, 2, 3], [1, 2, 3, 8], [1, 2, 3, 8, 9]]
    assert {(p.prompt_len, p.index, len(p.draft)) for p in positions(row)} == {(2, 4, 0)}
    assert row.tokens == [1, 2, 3]


def test_what_counts() -> None:
    assert agreed([], [5]) == [5]
    assert agreed([8, 9], [8, 9, 5]) == [8, 9, 5]
    assert agreed([8, 9], [8, 5, 6]) == [8, 5]
    assert agreed([8, 9], [5, 9, 6]) == [5]
    assert agreed([8, 9], [8, NO_TOKEN, 6]) == [8, NO_TOKEN]
    assert agreed([8, 9], [5, 9, BAD_LOGITS]) == [BAD_LOGITS], "even behind a wrong guess"
