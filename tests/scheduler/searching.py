"""Beam search written the slow way, over whole distributions: what `scheduler.beams` and the engine must find."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import cache

from model.params import Logprob
from scheduler.messages import BeamSearch

WORDS = 12
"""Tokens of the vocabulary: few, so that beams end, die and fork all the time."""

Found = tuple[list[int], float, bool]
"""Generated tokens, their logprob, and whether the last one is an end."""


@cache
def _following(tokens: tuple[int, ...], seed: int) -> list[float]:
    rng = random.Random(f"{seed} {tokens}")
    logits = [rng.gauss(0, 2) for _ in range(WORDS)]
    norm = math.log(sum(map(math.exp, logits)))
    return [logit - norm for logit in logits]


def following(tokens: Sequence[int], seed: int = 0) -> list[float]:
    """Logprob of every token after `tokens`."""
    return _following(tuple(tokens), seed)


def likeliest(tokens: Sequence[int], seed: int, count: int) -> Logprob:
    """As the sampler would say it of the likeliest token."""
    logprobs = following(tokens, seed)
    ids = sorted(range(WORDS), key=lambda token: -logprobs[token])[:count]
    return Logprob(logprobs[ids[0]], 1, ids, [logprobs[token] for token in ids])


def search_slowly(
    search: BeamSearch, ends: Collection[int], most: int, after: Callable[[list[int]], Sequence[float]]
) -> list[Found]:
    """Best first. `after`: logprob of every token after so many generated ones."""
    width, penalty = search.width, search.length_penalty
    running: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[float, Found]] = []
    for length in range(1, most + 1):
        every = [
            ([*tokens, token], logprob + more)
            for tokens, logprob in running
            for token, more in enumerate(after(tokens))
        ]
        every.sort(key=lambda entry: -entry[1])
        running = []
        for place, (tokens, logprob) in enumerate(every):
            stopped = tokens[-1] in ends
            if not stopped and length < most:
                running.append((tokens, logprob))
            elif place < width:
                ended.append((logprob / length**penalty, (tokens, logprob, stopped)))
        running = running[:width]
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        if len(ended) == width and running:
            far = most if search.early_stopping == "never" and penalty > 0 else length
            if search.early_stopping is True or running[0][1] / far**penalty <= ended[-1][0]:
                break
    return [found for _, found in ended]
