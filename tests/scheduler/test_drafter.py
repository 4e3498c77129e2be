"""When a sequence guesses, and how much."""

from __future__ import annotations

import random
from itertools import pairwise

from scheduler.drafter import MOST_PATIENCE, PATIENCE, Drafter

FREE, DEAR = 1e-6, 0.99


def ramble(count: int) -> list[int]:
    """Pairs come again and again, and never with the token that followed them the last time."""
    rng = random.Random(0)
    tokens, followed = [0, 1], dict[tuple[int, int], int]()
    while len(tokens) < count:
        pair = tokens[-2], tokens[-1]
        followed[pair] = rng.choice([token for token in range(6) if token != followed.get(pair)])
        tokens.append(followed[pair])
    return tokens


def play(text: list[int], known: int, price: float, most: int = 8) -> tuple[int, int]:
    """Steps and guesses that it takes to generate a text from its first `known` tokens."""
    tokens = text[:known]
    drafter = Drafter(tokens)
    steps = guesses = 0
    while len(tokens) < len(text):
        draft = drafter.draft(price, most)
        assert len(draft) <= most
        right = 0
        while right < len(draft) and text[len(tokens) + right : len(tokens) + right + 1] == [draft[right]]:
            right += 1
        if draft:
            drafter.learn(len(draft), right)
        steps += 1
        guesses += len(draft)
        tokens += text[len(tokens) : len(tokens) + right + 1]
    return steps, guesses


def test_a_copy_takes_few_steps() -> None:
    page = list(range(200))
    steps, guesses = play([*page, 900, *page], 203, 0.09)
    assert steps < 198 / 6
    assert guesses < 198


def test_new_text_costs_nothing() -> None:
    assert play(list(range(300)), 10, FREE) == (290, 0)


def test_guesses_that_never_come_true_are_given_up() -> None:
    text = ramble(1000)
    steps, guesses = play(text, 100, 0.09)
    assert steps + guesses <= 1.05 * 900
    steps, dear = play(text, 100, 0.6)
    assert dear <= guesses
    assert steps + dear <= 1.02 * 900


def test_a_sequence_that_had_given_up_notices_a_copy() -> None:
    """Soon after it begins: the matches become long, and those had not failed."""
    page = [1000 + i for i in range(200)]
    steps, _ = play([*page, *ramble(600), *page], 400, 0.09)
    assert steps < 400 + 200 / 4


def test_patience_grows_and_ends() -> None:
    drafter = Drafter([1, 2, 3, 1, 2])
    tried = []
    for ask in range(1000):
        if draft := drafter.draft(DEAR, 8):
            assert len(draft) == 1
            tried.append(ask)
            drafter.learn(1, 0)
    gaps = [b - a for a, b in pairwise(tried)]
    assert tried[0] == PATIENCE - 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == MOST_PATIENCE


def test_a_dear_guess_is_made_where_the_match_is_long() -> None:
    assert Drafter([1, 2, 3, 4, 5, 1, 2, 3, 4]).draft(0.8, 8) != []
    assert Drafter([1, 2, 3, 4, 5, 9, 2, 3, 4]).draft(0.8, 8) == []
    assert Drafter([1]).draft(FREE, 8) == []


def test_stopped() -> None:
    drafter = Drafter([1, 2, 3, 1, 2])
    assert drafter.draft(FREE, 8) == [3, 1]
    drafter.stop()
    assert all(drafter.draft(price, 8) == [] for price in (FREE, DEAR) for _ in range(20))
