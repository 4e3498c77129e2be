"""Greedy answers: one reader continues prompts, others read the same and say where they would have gone elsewhere.

As long as a reader would have said the same at every place, its own answer is the same text. One that leaves it is
judged at the later places too, which its own answer would not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loadtest.likelihood import BLOCK_SIZE, Reader
from model.batch import Batch, Executor, Row
from model.params import SamplingParams

PROMPTS = (
    "The capital of France is Paris. The capital of Japan is",
    "Water boils at a lower temperature on a mountain because",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "Dear Mrs. Alvarez, thank you for your letter of 3 May. We are sorry to hear that",
    "def is_prime(n: int) -> bool:\n    ",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    "import json\n\nwith open('settings.json') as file:\n    ",
    "<ul>\n  <li>Apples</li>\n  <li>",
    "Question: What is the difference between a virus and a bacterium?\nAnswer:",
    "Question: Why do leaves change their colour in autumn?\nAnswer:",
    "To make a simple tomato soup, first",
    "Three tips for a good night's sleep:\n1.",
    "The main causes of the First World War were",
    "In economics, inflation means",
    "A train leaves at 9:40 and arrives at 11:15. The journey takes",
    "User: Can you suggest a name for a small bookshop?\nAssistant:",
    "User: Translate 'good morning' into German, Spanish and Italian.\nAssistant:",
    "Abstract. We study how the size of a colony changes the behaviour of ants. Our results show",
    "The detective looked at the broken window, then at the wet footprints, and said:",
    "Photosynthesis is the process by which plants",
)
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)


@dataclass(slots=True)
class Agreement:
    """Of one reader with the texts so far."""

    places: int = 0
    same: int = 0
    texts: int = 0
    """Same at all of their places."""

    def add(self, same: Sequence[bool]) -> None:
        self.places += len(same)
        self.same += sum(same)
        self.texts += all(same)


def continued(runner: Executor, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` tokens more, each the likeliest; an end token ends nothing."""
    tokens, start = list(prompt), 0
    blocks = list(range(1, 1 - (-(len(prompt) + count) // BLOCK_SIZE)))
    for _ in range(count):
        row = Row(tokens, len(prompt), start, len(tokens) - start, blocks, GREEDY)
        ((token,),) = runner.execute(Batch([row])).result().tokens
        start = len(tokens)
        tokens.append(token)
    return tokens


@torch.inference_mode()
def followed(reader: Reader, tokens: list[int], begin: int) -> list[bool]:
    """Of tokens[begin:], whether each is what this reader finds likeliest behind those before it."""
    likeliest = reader.logprobs(reader.hidden(tokens)[begin - 1 :]).argmax(1)
    return [token == mine for token, mine in zip(tokens[begin:], likeliest.tolist(), strict=True)]
