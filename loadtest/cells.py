"""A cell of a comparison: how long prompts and answers are, and how many are in flight; and the prompts themselves.

Prompts are made of whole words that are one token each wherever they stand. So a prompt is the same for a server that
takes token ids and for one that takes only text, and it has exactly the length it should have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.workloads import BadWorkload, Prompt
from model.tokenizer import Tokenizer

_CELL = re.compile(r"(?:(\d+)\+)?(\d+)/(\d+)@(\d+(?:,\d+)*)")
_WORD = re.compile(rb" [a-z]{2,}")
FEWEST_WORDS = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """Lengths in tokens."""

    shared: int
    """All prompts of the cell begin with these."""
    own: int
    output_len: int
    concurrency: int

    @property
    def name(self) -> str:
        lengths = f"{self.shared}+{self.own}" if self.shared else str(self.own)
        return f"{lengths}/{self.output_len}@{self.concurrency}"

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return self.shared + self.own + self.output_len


def parse_cells(text: str) -> list[Cell]:
    """`512/128@1,8` is two cells: 512 tokens in, 128 out, 1 and 8 requests at once; `512+32/64@32` shares 512 of 544.

    Raises ValueError.
    """
    found = _CELL.fullmatch(text)
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if found is None or 0 in numbers or max(numbers) > 1 << 20:
        raise ValueError(f"{text!r} is not IN/OUT@CLIENTS, e.g. 512/128@1,8,32 or, with a shared part, 512+32/64@32")
    shared, own, output_len, clients = found.groups()
    return [Cell(int(shared or 0), int(own), int(output_len), int(client)) for client in clients.split(",")]


class Words:
    """The tokens that are a space and lower-case letters, of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises BadWorkload where the vocabulary has too few."""
        self._tokenizer = tokenizer
        self._ids = np.array(
            [
                id_
                for id_ in range(tokenizer.vocab_size)
                if _WORD.fullmatch(text := tokenizer.token_bytes(id_))
                and tokenizer.encode(text.decode(), add_special_tokens=False) == [id_]
            ]
        )
        if len(self._ids) < FEWEST_WORDS:
            raise BadWorkload(f"the vocabulary has {len(self._ids)} whole words; at least {FEWEST_WORDS} are needed")

    def prompts(self, cell: Cell, count: int, seed: Sequence[int]) -> list[Prompt]:
        """All different, as token ids; the same for the same seed."""
        generator = np.random.default_rng([*seed, cell.shared, cell.own, cell.output_len, cell.concurrency])
        shared = generator.choice(self._ids, cell.shared)
        return [
            Prompt([*shared.tolist(), *generator.choice(self._ids, cell.own).tolist()], length, cell.output_len)
            for length in [cell.shared + cell.own] * count
        ]

    def as_text(self, prompt: Prompt) -> Prompt:
        """The same as text. Raises BadWorkload where the tokenizer would not read it back as the same ids."""
        ids = prompt.content
        text = b"".join(self._tokenizer.token_bytes(id_) for id_ in ids if isinstance(id_, int)).decode()
        if self._tokenizer.encode(text, add_special_tokens=True) != ids:
            raise BadWorkload("the model's tokenizer adds to a text, so no text has exactly the prompt's tokens")
        return Prompt(text, prompt.input_len, prompt.output_len)
