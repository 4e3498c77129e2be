"""Drafts change how many steps a text takes, and nothing else: the oracle knows of none."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from model.batch import Batch
from model.params import SamplingParams
from scheduler.limits import Limits
from scheduler.messages import FinishReason
from scheduler.sequence import Sequence
from tests.scheduler.test_engine_random import add

if TYPE_CHECKING:
    from tests.scheduler.conftest import World


def limits(most: int = 8, tokens: int = 64, seqs: int = 16, length: int = 10_000, switch: int | None = None) -> Limits:
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        rope_switch=switch,
        watermark=0.0,
        num_speculative_tokens=most,
    )


def parrot(tokens: list[int], params: SamplingParams, index: int) -> int:
    """A text that comes back to what it said before, and then now and then says something else."""
    recent = f"{params.seed} {index} {tokens[-2:]}".encode()
    token = zlib.crc32(recent) % 12
    if zlib.crc32(f"{tokens}".encode()) % 9 == 0:
        token = (token + len(tokens)) % 12
    masked = token in params.stop_token_ids and len(tokens) - params.top_k < params.min_tokens
    return token + 1 if masked else token


def contrarian(tokens: list[int], params: SamplingParams, index: int) -> int:
    """Says pairs again and again, and never goes on as the last time."""
    pair = tokens[-2:]
    ends = [i for i in range(len(tokens) - 1) if tokens[max(i - 1, 0) : i + 1] == pair]
    before = tokens[ends[-1] + 1] if ends else -1
    choices = [token for token in range(5) if token != before]
    return choices[zlib.crc32(f"{tokens}".encode()) % len(choices)]


def running(world: World) -> list[Sequence]:
    return world.engine._state.running


def assert_nothing_is_left_of_drafts(world: World) -> None:
    size = world.pool.block_size
    for sequence in running(world):
        assert len(sequence.table.blocks) <= -(-(sequence.num_computed + 1) // size)


@pytest.mark.usefixtures("hopeful")
@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize(("blocks", "size", "caching"), [(12, 4, True), (30, 4, True), (10, 16, True), (14, 4, False)])
def test_random_steps(
    world: type[World], rng: random.Random, blocks: int, size: int, caching: bool, chunk: int
) -> None:
    it = world(blocks, size, caching, limits(rng.choice([3, 8]), chunk, 8, 120, rng.choice([None, 24])))
    it.runner.draw = parrot
    stems = [[rng.randrange(12) for _ in range(30)] for _ in range(2)]
    for _ in range(500):
        busy = sum(stream.finish is FinishReason.RUNNING for stream in it.streams.values())
        if rng.random() < 0.5 and busy < 12:
            add(it, rng, stems)
        if rng.random() < 0.05 and it.submits:
            it.abort(rng.choice(list(it.submits)), rng.choice([None, 0, 1, 3]))
        it.step()
        assert_nothing_is_left_of_drafts(it)
    it.run()
    it.verify()
    assert it.last is not None
    stats = it.last.stats
    assert 0 < stats.drafts <= stats.drafted_tokens == it.runner.drafted
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions > 0


def test_a_copy_takes_few_steps(world: type[World]) -> None:
    it = world(limits=limits())
    page = list(range(60))
    it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 60
    it.add([*page, 0, 1], max_tokens=50, logprobs=0)
    it.run()
    it.verify()
    assert it.last is not None
    stats = it.last.stats
    assert stats.steps < 12
    assert stats.accepted_tokens == 50 - stats.steps
    assert stats.computed_tokens == 62
    assert it.runner.batches[-1][0][0] < 62 + 49, "nothing is computed that is not needed"


def free(batch: Batch) -> float:
    return 0.01


def fair(batch: Batch) -> float:
    return 0.01 + 0.001 * sum(row.count + len(row.draft) for row in batch.rows)


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize(("seconds", "share"), [(free, 0.08), (fair, 0.06)])
def test_text_that_defies_every_guess_costs_little(
    world: type[World], seqs: int, seconds: Callable[[Batch], float], share: float
) -> None:
    it = world(blocks=400, limits=limits())
    it.runner.draw = contrarian
    it.runner.seconds = seconds
    for number in range(seqs):
        it.add(range(number), max_tokens=300) if number else it.add([9], max_tokens=300)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.steps == 300
    assert 0 < it.last.stats.drafted_tokens < share * seqs * 300


def test_off(world: type[World]) -> None:
    it = world(limits=limits(most=0))
    it.runner.draw = parrot
    it.add(range(10), max_tokens=50)
    it.run()
    it.verify()
    assert it.runner.drafted == 0


def test_every_length_ends_where_it_should(world: type[World]) -> None:
    """At max_tokens, at the context and at the pool, wherever in a draft that is; and resumed from any point."""
    for most in range(1, 30):
        it = world(limits=limits())
        it.runner.draw = parrot
        it.add([1, 2, 3, 4] * 4, max_tokens=most)
        it.run()
        it.verify()
        told = it.streams[1, 0].tokens
        again = world(limits=limits(length=40))
        again.runner.draw = parrot
        again.add([1, 2, 3, 4] * 4, max_tokens=1000, generated=[told])
        again.run()
        again.verify()
    it = world(blocks=5, limits=limits())
    it.runner.draw = parrot
    it.add([1, 2, 3, 4] * 3, max_tokens=1000)
    it.run()
    it.verify()


def test_a_stop_token_within_a_draft_ends_it(world: type[World]) -> None:
    for stop in range(8, 30):
        for least in (0, 40):
            it = world(limits=limits())
            it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 30
            request = it.add([*range(30), *range(8)], stops=(stop,), min_tokens=least, max_tokens=100, logprobs=0)
            masked = it.runner.draw
            it.runner.draw = lambda tokens, params, index, masked=masked: (  # type: ignore[misc]
                0
                if masked(tokens, params, index) in params.stop_token_ids and len(tokens) - 38 < params.min_tokens
                else masked(tokens, params, index)
            )
            it.run()
            it.verify()
            assert it.streams[request, 0].tokens[-1] == stop or least


def test_siblings_draft_each_its_own(world: type[World]) -> None:
    for length in (8, 9, 16):
        it = world(limits=limits())
        it.runner.draw = parrot
        it.add(([1, 2, 3] * 6)[:length], max_tokens=40, n=3)
        it.run()
        it.verify()
        assert it.runner.drafted > 0


def test_the_switch_of_rotary_factors_comes_at_its_token(world: type[World]) -> None:
    for switch in range(10, 30):
        it = world(limits=limits(switch=switch))
        it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 5
        it.add([0, 1, 2, 3, 4, 0, 1], max_tokens=40)
        it.run()
        it.verify()


def test_logprobs_of_the_prompt_come_first(world: type[World]) -> None:
    it = world(limits=limits(tokens=5))
    it.runner.draw = parrot
    it.add([1, 2, 3] * 5, max_tokens=30, prompt_logprobs=0, logprobs=0)
    it.run()
    it.verify()


def test_the_token_budget_holds(world: type[World]) -> None:
    it = world(limits=limits(tokens=9, seqs=3))
    it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 6
    for _ in range(3):
        it.add([0, 1, 2, 3, 4, 5] * 2, max_tokens=60)
    sizes = []
    while it.inbox or it.engine.has_work:
        sizes.append(it.step().stats.step_tokens)
    it.verify()
    assert max(sizes) == 9


def test_a_prompt_has_its_step_for_itself_where_steps_are_timed(world: type[World]) -> None:
    timed = replace(limits(tokens=16), target_step_time=0.1)
    for given in (timed, limits(tokens=16)):
        it = world(limits=given)
        it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 6
        it.add([0, 1, 2, 3, 4, 5] * 2, max_tokens=60)
        for _ in range(3):
            it.step()
        it.add(range(20, 26), max_tokens=1)
        before = it.runner.drafted
        it.step()
        assert (it.runner.drafted > before) == (given is not timed)
        it.run()
        it.verify()


@pytest.mark.parametrize("blocks", [8, 9, 10])
def test_nobody_is_preempted_for_a_draft(world: type[World], blocks: int) -> None:
    """Two texts that just fit, and an old prefix in the rest of the pool."""
    for most in (0, 8):
        it = world(blocks=blocks, limits=limits(most))
        it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 4
        it.add(range(20, 20 + 4 * (blocks - 8) + 1), max_tokens=1)
        it.run()
        for _ in range(2):
            it.add([0, 1, 2, 3, 0], max_tokens=11)
        it.run()
        it.verify()
        assert it.last is not None
        assert it.last.stats.preemptions == 0
        assert (it.last.stats.accepted_tokens > 0) == (most > 0)


def test_a_busy_step_drafts_less(world: type[World]) -> None:
    """Where a row costs almost as much as a step, guesses that are right half of the time are not worth it. What a row
    costs is learned from a hundred steps."""
    drafted = {}
    for row_seconds in (0.001, 0.1):
        it = world(blocks=2000, limits=limits(tokens=512))
        it.runner.draw = parrot
        it.runner.seconds = lambda batch, each=row_seconds: (  # type: ignore[misc]
            0.1 + each * sum(row.count + len(row.draft) for row in batch.rows)
        )
        for number in range(12):
            it.add([number, 1, 2], max_tokens=400, seed=number)
        it.run()
        it.verify()
        drafted[row_seconds] = it.runner.drafted
    assert drafted[0.1] < drafted[0.001] / 2


def test_numbers_that_a_draft_broke_are_computed_anew_without_one(world: type[World]) -> None:
    it = world(limits=limits())
    it.runner.draw = parrot
    it.runner.spoiled = lambda row: 3 in row.draft
    for number in range(4):
        it.add([number, *[1, 2, 3] * 4], max_tokens=40)
    it.run()
    it.verify()
    assert it.runner.drafted > 0


def test_broken_numbers_behind_right_guesses_end_the_request_there(world: type[World]) -> None:
    it = world(limits=limits())
    it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 5
    it.runner.spoiled = lambda row: len(row.tokens) + len(row.draft) > 30
    it.add([0, 1, 2, 3, 4, 0], max_tokens=60)
    it.add([0, 1, 2, 3, 4, 0, 1], max_tokens=20)
    it.run()
    assert "not finite" in it.streams[1, 0].error
    assert it.streams[1, 0].tokens == it.expected(1, 0).tokens[: 30 - 6 + 1]
    assert it.streams[2, 0] == it.expected(2, 0)


def test_a_mask_that_leaves_nothing_ends_it_within_a_draft(world: type[World]) -> None:
    it = world(limits=limits())
    it.runner.draw = lambda tokens, params, index: (tokens[-1] + 1) % 5
    it.runner.muted = lambda row: len(row.tokens) == 25
    it.add([0, 1, 2, 3, 4, 0], max_tokens=60)
    it.run()
    assert it.streams[1, 0].finish is FinishReason.STOP
    assert it.streams[1, 0].tokens == it.expected(1, 0).tokens[:19]
    assert it.runner.drafted > 0
