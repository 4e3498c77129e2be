"""Prompts computed, and decoded together, by several runners in turn: a busy neighbour hurts all of them alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from loadtest.greedy import GREEDY
from loadtest.growth import timed
from loadtest.likelihood import BLOCK_SIZE
from model.batch import Batch, Row
from model.runner import LoadedModel


@dataclass(slots=True)
class Times:
    """Of one runner, in seconds."""

    prefill: list[float] = field(default_factory=list)
    """Of each prompt, alone."""
    decode: list[float] = field(default_factory=list)
    """Of each step in which all streams decode one token."""

    def rates(self, streams: int, context: int) -> tuple[float, float]:
        """Tokens a second of a prompt, and of all streams together, by the median."""
        return context / median(self.prefill), streams / median(self.decode)


def take_turns(
    runners: Sequence[LoadedModel], streams: int, context: int, steps: int, done: Callable[[], object]
) -> list[Times]:
    """`streams` prompts of `context` random tokens each, in a pool that holds them, then `steps` decode steps, each of
    the last token again, so that contexts stay as long as they are. `done` is called after each turn of all."""
    generator = random.Random(0)
    each = -(-context // BLOCK_SIZE)
    vocab = min(loaded.model_config.vocab_size for loaded in runners)
    rows = [
        Row([generator.randrange(vocab) for _ in range(context)], context, context - 1, 1, blocks, GREEDY)
        for blocks in (list(range(1 + n * each, 1 + (n + 1) * each)) for n in range(streams))
    ]
    times = [Times() for _ in runners]
    for row in rows:
        for loaded, own in zip(runners, times, strict=True):
            own.prefill.append(sum(timed(loaded.runner, batch) for batch in _chunks(loaded, row)))
        done()
    for step in range(1 + steps):
        for loaded, own in zip(runners, times, strict=True):
            seconds = timed(loaded.runner, Batch(rows))
            if step:  # the first one warms up
                own.decode.append(seconds)
        done()
    return times


def _chunks(loaded: LoadedModel, row: Row) -> list[Batch]:
    """The steps of a prompt."""
    size, most = len(row.tokens), loaded.max_num_batched_tokens
    return [
        Batch([Row(row.tokens, size, start, min(most, size - start), row.blocks, GREEDY)])
        for start in range(0, size, most)
    ]
