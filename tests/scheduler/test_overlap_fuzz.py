"""Random steps twice: with each step read at once, and with one in flight while the next is planned.

The same requests and aborts come at the same steps. Whatever is waited for, dropped, preempted, forked or computed
again on the way, every stream brings the same tokens and the same end; and what the oracle says, where it knows. With
FUZZ=3 they are ten thousand: three runs, for one that is three times as long takes nine times as long.
"""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvpool.slots import MemorySlots
from kvpool.tier import Tier
from scheduler.limits import Limits
from scheduler.messages import BeamSearch, EngineStats, FinishReason
from tests.fuzzing import FACTOR
from tests.scheduler.conftest import World
from tests.scheduler.searching import WORDS
from tests.scheduler.test_engine_random import add
from tests.scheduler.test_grammar import END, PATTERNS, constrained, regex
from tests.scheduler.test_speculation import parrot

STOP = 7


@dataclass(frozen=True)
class Mix:
    """A pool, and what happens in it."""

    name: str
    blocks: int = 12
    size: int = 4
    caching: bool = True
    chunk: int = 64
    drafts: int = 0
    grammars: bool = False
    searches: bool = False
    faults: bool = False
    """Some rows fail, always."""
    hiccups: bool = False
    """Now and then a step fails, once."""
    windows: tuple[int | None, ...] = (None,)
    tier: bool = False


MIXES = [
    Mix("small pool"),
    Mix("long prompts", 30, chunk=7),
    Mix("large blocks", 10, 16),
    Mix("no prefixes", 14, caching=False, chunk=16),
    Mix("drafts", 20, drafts=8),
    Mix("grammars", 20, grammars=True, drafts=3),
    Mix("searches", 24, searches=True),
    Mix("faults", 24, chunk=16, faults=True),
    Mix("hiccups", 24, hiccups=True),
    Mix("window", 20, windows=(9,)),
    Mix("windows", 44, windows=(None, 9, 9)),
    Mix("searches in windows", 60, searches=True, windows=(None, 9)),
    Mix("drafts in windows", 50, drafts=8, windows=(None, 9)),
    Mix("tier", 12, tier=True),
]
STEPS = 310
log = logging.getLogger(__name__)


def make(mix: Mix, depth: int, switch: int | None) -> World:
    limits = Limits(
        max_num_seqs=8,
        max_num_batched_tokens=mix.chunk,
        max_model_len=120,
        rope_switch=switch,
        num_speculative_tokens=mix.drafts,
        watermark=0.0,
    )
    tier = Tier(MemorySlots(40, mix.size * 8)) if mix.tier else None
    it = World(mix.blocks, mix.size, mix.caching, limits, mix.windows, tier, depth)
    if mix.grammars:
        constrained(it)
    if mix.drafts:
        it.runner.draw = parrot
    if mix.faults:
        it.runner.raises = lambda row: sum(row.tokens) % 89 == 0
        it.runner.spoiled = lambda row: sum(row.tokens) % 89 == 1
    if mix.hiccups:
        calls = itertools.count(1)
        it.runner.raises = lambda row: next(calls) % 61 == 0
    return it


def ask(it: World, mix: Mix, rng: random.Random, stems: list[list[int]]) -> None:
    """A random request into the inbox."""
    if mix.searches and rng.random() < 0.4:
        width = rng.choice([1, 2, 3])
        search = BeamSearch(
            width=width, length_penalty=rng.choice([0.0, 1.0]), early_stopping=rng.choice([True, False])
        )
        prompt = [rng.randrange(WORDS) for _ in range(rng.choice([1, 5, 12]))]
        it.add(
            prompt, rng.choice([1, 5, 12]), n=rng.randint(1, width), search=search, stops=(2,), seed=rng.randrange(3)
        )
        return
    add(it, rng, stems)
    changes: dict[str, Any] = {"presence_penalty": rng.choice([0.0, 0.0, 0.0, 0.5])}
    submit = it.inbox[-1]
    assert submit is it.submits[submit.id]
    if mix.grammars and rng.random() < 0.4 and not any(submit.generated):
        changes |= {
            "grammar": regex(rng.choice(PATTERNS)),
            "stop_token_ids": (END,),
            "logprobs": None,
            "prompt_logprobs": None,
        }
    params = msgspec.structs.replace(submit.params, **changes)
    it.submits[submit.id] = it.inbox[-1] = msgspec.structs.replace(submit, params=params)


def tell(it: World, other: World) -> None:
    """What came into one inbox comes into the other, too."""
    for request, submit in it.submits.items():
        if request not in other.submits:
            other.submits[request] = submit
            other.times[request] = []
            for index in range(submit.n):
                other.streams[request, index] = type(it.streams[request, index])(
                    it.streams[request, index].tokens.copy()
                )
    other.inbox = it.inbox.copy()


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_streams_do_not_know_the_depth(rng: random.Random, mix: Mix) -> None:
    runs = [both(rng, mix)]
    for _ in range(FACTOR - 1):  # other ones every time
        seed = random.SystemRandom().getrandbits(32)
        log.warning("seed %d", seed)  # shown where it fails
        runs.append(both(random.Random(seed), mix))
    assert any(stats.preemptions > 0 for stats in runs) or mix.chunk < 64
    assert any(stats.accepted_tokens > 0 for stats in runs) or not mix.drafts
    assert any(stats.failed_raised > 0 and stats.failed_logits > 0 for stats in runs) or not mix.faults
    assert any(stats.tier_restores > 0 for stats in runs) or not mix.tier


def both(rng: random.Random, mix: Mix) -> EngineStats:
    """Of the one that looks ahead, at its end."""
    switch = rng.choice([None, 24]) if mix.windows == (None,) else None
    alone, ahead = (make(mix, depth, switch) for depth in (0, 1))
    alone.engine.check = lambda: None  # type: ignore[method-assign]  # What others test takes half of the time.
    stems = [[rng.randrange(12) for _ in range(30)] for _ in range(2)]
    for _ in range(STEPS):
        busy = sum(stream.finish is FinishReason.RUNNING for stream in ahead.streams.values())
        if rng.random() < 0.5 and busy < 24:
            ask(alone, mix, rng, stems)
        if rng.random() < 0.05 and alone.submits:
            alone.abort(rng.choice([*alone.submits][-12:]), rng.choice([None, 0, 1, 3]))
        tell(alone, ahead)
        alone.step()
        ahead.step()
    alone.run()
    ahead.run()
    for stream, other in zip(alone.streams.values(), ahead.streams.values(), strict=True):
        if FinishReason.ABORT in (stream.finish, other.finish):
            common = min(len(stream.tokens), len(other.tokens))
            assert stream.tokens[:common] == other.tokens[:common]
        else:
            assert stream == other
    for request in alone.prompt_values.keys() & ahead.prompt_values.keys():
        assert alone.prompt_values[request] == ahead.prompt_values[request]
    if not (mix.faults or mix.grammars):
        ahead.verify()
    assert ahead.last is not None
    return ahead.last.stats
