"""Prompts: exact lengths, ordinary tokens, reproducible, and recorded conversations from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadtest.workloads import (
    LONGEST_INPUT,
    LONGEST_TOTAL,
    MEAN_INPUT,
    BadWorkload,
    Prompt,
    TokenRange,
    Turn,
    conversation_like_prompts,
    random_prompts,
    read_sharegpt,
    shared_prefix_prompts,
    turn_prompt,
)

TOKENS = TokenRange(100, 400)


def ids(prompt: Prompt) -> list[int]:
    assert isinstance(prompt.content, list)
    return prompt.content


def test_random_prompts() -> None:
    prompts = random_prompts(50, 128, 32, 0.0, TOKENS, seed=1)
    assert {(len(ids(p)), p.input_len, p.output_len) for p in prompts} == {(128, 128, 32)}
    assert all(100 <= id < 400 for p in prompts for id in ids(p))
    assert len({tuple(ids(p)) for p in prompts}) == 50
    assert prompts == random_prompts(50, 128, 32, 0.0, TOKENS, seed=1)
    assert not {tuple(ids(p)) for p in prompts} & {
        tuple(ids(p)) for p in random_prompts(50, 128, 32, 0.0, TOKENS, seed=2)
    }


def test_random_lengths() -> None:
    prompts = random_prompts(2000, 100, 10, 0.5, TOKENS, seed=1)
    assert all(p.input_len == len(ids(p)) for p in prompts)
    assert {p.input_len for p in prompts} == set(range(50, 151))
    assert {p.output_len for p in prompts} == set(range(5, 16))


def test_shared_prefix() -> None:
    prompts = shared_prefix_prompts(9, 2, 64, 8, 5, TOKENS, seed=3)
    assert {len(ids(p)) for p in prompts} == {72}
    assert len({tuple(ids(p)[:64]) for p in prompts}) == 2
    assert ids(prompts[0])[:64] == ids(prompts[2])[:64] != ids(prompts[1])[:64]
    assert len({tuple(ids(p)[64:]) for p in prompts}) == 9


def test_conversation_like() -> None:
    prompts = conversation_like_prompts(3000, None, TOKENS, seed=0)
    inputs = np.array([p.input_len for p in prompts])
    assert inputs.min() >= 4
    assert inputs.max() <= LONGEST_INPUT
    assert max(p.input_len + p.output_len for p in prompts) <= LONGEST_TOTAL
    assert all(len(ids(p)) == p.input_len for p in prompts[:50])
    # Cutting the long tail takes some off the mean.
    assert 0.75 * MEAN_INPUT < inputs.mean() < 1.05 * MEAN_INPUT
    assert {p.output_len for p in conversation_like_prompts(5, 9, TOKENS, seed=0)} == {9}


@pytest.mark.parametrize(
    ("size", "low", "high"), [(None, 1000, 31_000), (49_152, 1000, 46_080), (256, 32, 240), (16, 2, 15)]
)
def test_range_leaves_out_both_ends(size: int | None, low: int, high: int) -> None:
    assert TokenRange.of_vocabulary(size) == TokenRange(low, high)


def test_tiny_vocabulary() -> None:
    with pytest.raises(BadWorkload, match="at least 16"):
        TokenRange.of_vocabulary(9)


def say(*texts: object) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def test_sharegpt_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([say("q1", "a1", "q2"), say("only one"), say("q3", "a3"), {}, 7, say(1, "x")]))
    turns = list(read_sharegpt(path, seed=0))
    assert sorted(turns, key=str) == [Turn("q1", "a1"), Turn("q3", "a3")]
    path.write_text(json.dumps([say(f"q{n}", f"a{n}") for n in range(100)]))
    first, again, other = (list(read_sharegpt(path, seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ('{"a":1}', "no list"), ("[]", "no entry"), ('[{"conversations":[]}]', "no entry")],
)
def test_bad_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(BadWorkload, match=words):
        read_sharegpt(path, seed=0)
    with pytest.raises(BadWorkload, match="No such file"):
        read_sharegpt(tmp_path / "missing.json", seed=0)


@pytest.mark.parametrize(
    ("lengths", "output_len", "fits"),
    [
        ((4, 4), None, True),
        ((3, 40), None, False),
        ((40, 3), None, False),
        ((40, 3), 8, True),
        ((1024, 1024), None, True),
        ((1025, 40), None, False),
        ((1000, 1049), None, False),
    ],
)
def test_turns_of_odd_lengths_are_left_out(lengths: tuple[int, int], output_len: int | None, fits: bool) -> None:
    prompt = turn_prompt(Turn("q", "a"), *lengths, output_len)
    assert (prompt is not None) == fits
    if prompt is not None:
        assert prompt == Prompt("q", lengths[0], output_len or lengths[1])
