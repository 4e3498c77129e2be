"""What is asked: prompts and how long their answers should be. Seeded, so that a run can be repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class BadWorkload(Exception):
    """The workload cannot be made as asked; one line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to come."""

    content: list[int] | str
    """Token ids, or text."""
    input_len: int
    """Tokens; an estimate where the content is text."""
    output_len: int
    """max_tokens."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids low, …, high - 1, all of them ordinary ones."""

    low: int
    high: int

    @classmethod
    def of_vocabulary(cls, size: int | None) -> TokenRange:
        """Ids that are ordinary in every common tokenizer of `size` tokens, or of 32,000 or more where None.

        Special tokens and raw bytes stand at the beginning (up to the first thousand) or at the very end.
        """
        if size is None:
            return cls(1000, 31_000)
        if size < 16:
            raise BadWorkload(f"a vocabulary of {size} tokens is too small to draw random prompts from; at least 16")
        return cls(min(1000, size // 8), size - size // 16)

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = generator.integers(self.low, self.high, count).tolist()
        return ids


def random_prompts(
    count: int, input_len: int, output_len: int, range_ratio: float, tokens: TokenRange, seed: int
) -> list[Prompt]:
    """Random tokens, all prompts different. Lengths are uniform within ±range_ratio of those given."""
    generator = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - range_ratio))), max(1, round(mean * (1 + range_ratio)))
        drawn: list[int] = generator.integers(low, high + 1, count).tolist()
        return drawn

    return [
        Prompt(tokens.draw(generator, n), n, out)
        for n, out in zip(lengths(input_len), lengths(output_len), strict=True)
    ]


def shared_prefix_prompts(
    count: int, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int, tokens: TokenRange, seed: int
) -> list[Prompt]:
    """Each prompt is one of a few common beginnings, in turn, and an end of its own."""
    generator = np.random.default_rng(seed)
    prefixes = [tokens.draw(generator, prefix_len) for _ in range(num_prefixes)]
    return [
        Prompt(prefixes[i % num_prefixes] + tokens.draw(generator, suffix_len), prefix_len + suffix_len, output_len)
        for i in range(count)
    ]


MEAN_INPUT, MEAN_OUTPUT = 161.31, 337.99
"""Of ShareGPT, in tokens: Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023), figure 11."""
SPREAD = 1.1
"""Standard deviation of the logarithm."""
SHORTEST, LONGEST_INPUT, LONGEST_TOTAL = 4, 1024, 2048
"""Requests outside are left out, as `vllm bench serve` does."""


def conversation_like_prompts(count: int, output_len: int | None, tokens: TokenRange, seed: int) -> list[Prompt]:
    """Random tokens with lengths like those of ShareGPT's first turns: lognormal, cut where the file would be cut."""
    generator = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        n, out = (
            round(generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)) for mean in (MEAN_INPUT, MEAN_OUTPUT)
        )
        out = out if output_len is None else output_len
        if _fits(n, out):
            prompts.append(Prompt(tokens.draw(generator, n), n, out))
    return prompts


def _fits(input_len: int, output_len: int) -> bool:
    return SHORTEST <= input_len <= LONGEST_INPUT and SHORTEST <= output_len <= LONGEST_TOTAL - input_len


@dataclass(frozen=True, slots=True)
class Turn:
    """The first question and answer of a recorded conversation."""

    question: str
    answer: str


def read_sharegpt(path: Path, seed: int) -> Iterator[Turn]:
    """First turns of a ShareGPT file, in random order.

    The file is a JSON list of {"conversations": [{"value": …}, {"value": …}, …]}. Raises BadWorkload for any other.
    """
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise BadWorkload(f"--dataset-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadWorkload(f"--dataset-path {path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise BadWorkload(f"--dataset-path {path} is not a ShareGPT file: the JSON is no list")
    turns = [turn for entry in entries if (turn := _turn(entry)) is not None]
    if not turns:
        raise BadWorkload(f"--dataset-path {path} is not a ShareGPT file: no entry has two texts in `conversations`")
    order = np.random.default_rng(seed).permutation(len(turns))
    return (turns[i] for i in order)


def _turn(entry: Any) -> Turn | None:
    said = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(said, list) or len(said) < 2:
        return None
    question, answer = (part.get("value") if isinstance(part, dict) else None for part in said[:2])
    return Turn(question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def turn_prompt(turn: Turn, question_len: int, answer_len: int, output_len: int | None) -> Prompt | None:
    """The request of a turn, given its lengths in tokens; None where it is too short or too long."""
    out = answer_len if output_len is None else output_len
    return Prompt(turn.question, question_len, out) if _fits(question_len, out) else None
