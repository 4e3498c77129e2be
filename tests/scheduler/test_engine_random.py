"""Ten thousand random steps: add, resume, abort, preempt, fork; invariants after every one, the oracle at the end."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from scheduler.limits import Limits
from scheduler.messages import FinishReason

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

STEPS = 850
STOP = 7
ONE = (None,)


def add(world: World, rng: random.Random, stems: list[list[int]]) -> None:
    """A random request. Prompts share beginnings; some are larger than the pool can hold with what they generate."""
    stem = rng.choice(stems)
    most = world.capacity - 2
    tail = [rng.randrange(40) for _ in range(rng.choice([0, 1, 3, 8, 20]))]
    prompt = (stem[: rng.choice([0, 1, 7, 8, 16, 30])] + tail)[:most] or [1]
    n = rng.choice([1, 1, 1, 2, 4])
    params: dict[str, Any] = {
        "max_tokens": rng.choice([0, 1, 2, 5, 12, 40, 10_000]),
        "seed": rng.randrange(3),
        "min_tokens": rng.choice([0, 0, 3]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
    }
    generated: list[list[int]] = []
    if params["max_tokens"] and rng.random() < 0.2:
        # Resumed: every sequence has some beginning of what it would have got.
        probe = world.add(prompt, n=n, stops=(STOP,), **params)
        world.inbox.pop()
        ends = [world.expected(probe, i).tokens for i in range(n)]
        generated = [end[: rng.randrange(len(end) + 1)] for end in ends]
        del world.submits[probe], world.times[probe]
        for i in range(n):
            del world.streams[probe, i]
    world.add(
        prompt,
        n=n,
        stops=(STOP,),
        generated=generated,
        priority=rng.choice([0, 0, 0, 1, -1]),
        salt=rng.choice([b"", b"", b"other"]),
        logprobs=rng.choice([None, 0]),
        **params,
    )


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(
    ("blocks", "size", "caching", "windows"),
    [
        (12, 4, True, ONE),
        (30, 4, True, ONE),
        (10, 16, True, ONE),
        (14, 4, False, ONE),
        (44, 4, True, (None, 9, 9)),
        (54, 4, True, (None, None, 14)),
    ],
)
def test_random_steps(
    world: type[World],
    rng: random.Random,
    blocks: int,
    size: int,
    caching: bool,
    windows: tuple[int | None, ...],
    chunk: int,
) -> None:
    switch = rng.choice([None, 24])
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=120, rope_switch=switch, watermark=0.0)
    it = world(blocks, size, caching, limits, windows)
    stems = [[rng.randrange(40) for _ in range(30)] for _ in range(2)]
    forks = 0
    for _ in range(STEPS):
        busy = sum(stream.finish is FinishReason.RUNNING for stream in it.streams.values())
        if rng.random() < 0.5 and busy < 24:
            add(it, rng, stems)
        if rng.random() < 0.05 and it.submits:
            it.abort(rng.choice(list(it.submits)), rng.choice([None, 0, 1, 3]))
        it.step()
        forks += it.pool._surplus > 0
    it.run()
    it.verify()
    assert it.last is not None
    assert forks > 0
    assert it.last.stats.preemptions > 0 or chunk == 1
    assert it.last.stats.prefix_hit_tokens > 0 or not caching
