"""Requests for a vector: through chunks, preemption and neighbours to one vector and one end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from model.batch import Batch
from model.embedding import Kind, Pooling
from model.params import SamplingParams
from model.pooling import finished, pooled
from scheduler.limits import Limits
from scheduler.messages import Abort, FinishReason, StepOutput, Submit

if TYPE_CHECKING:
    from tests.scheduler.conftest import Done, World

SIZE = 4
STOP = int(FinishReason.STOP)


def states(tokens: list[int], positions: range) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """What a causal model would have there: a function of all tokens up to the position."""
    sums = np.cumsum(tokens)
    return np.array([[np.sin(sums[p] * (i + 1) + p) for i in range(SIZE)] for p in positions], np.float32)


def right(prompt: list[int], kind: Kind) -> bytes | None:
    pooling = Pooling(kind=kind, size=SIZE)
    return finished(pooled(states(prompt, range(len(prompt))), None, pooling), len(prompt), pooling)


def teach(it: World) -> None:
    """Let the fake runner pool, as the real one does."""
    execute = it.runner.execute

    def pooling(batch: Batch) -> Done:
        done = execute(batch)
        for number, row in enumerate(batch.rows):
            if row.params.pooling is not None:
                part = states(row.tokens, range(row.start, row.start + row.count))
                if it.runner.spoiled(row):
                    part = part * np.float32(np.inf)
                done.value.pooled[number] = pooled(part, row.pooled, row.params.pooling)
        return done

    it.runner.execute = pooling  # type: ignore[method-assign]


def submit(id: int, prompt: list[int], kind: Kind, **changes: object) -> Submit:
    params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(kind=kind, size=SIZE))
    return msgspec.structs.replace(Submit(id=id, prompt_ids=prompt, params=params), **changes)


def drive(it: World, inbox: list[Submit | Abort]) -> tuple[dict[int, bytes], dict[int, int], list[StepOutput]]:
    """Until nobody has work: vectors and ends by request."""
    vectors: dict[int, bytes] = {}
    ends: dict[int, int] = {}
    outputs: list[StepOutput] = []
    while inbox or it.engine.has_work:
        outputs.append(it.engine.step(inbox))
        inbox = []
        it.engine.check()
        out = outputs[-1]
        for item in out.pooled:
            assert item.id not in vectors
            vectors[item.id] = item.vector
        ends |= {id: finish for id, finish in zip(out.ids, out.finishes, strict=True) if finish}
        assert {item.id for item in out.pooled} <= set(out.ids), "a vector comes with the end"
        assert len(outputs) < 1000
    assert outputs[-1].stats.blocks_active == 0
    return vectors, ends, outputs


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_in_chunks_and_beside_others(world: type[World], kind: Kind) -> None:
    it = world(limits=Limits(max_num_seqs=16, max_num_batched_tokens=7, max_model_len=1000))
    teach(it)
    prompts = {id: [(id * 7 + i) % 40 for i in range(3 + 9 * id)] for id in range(1, 6)}
    vectors, ends, outputs = drive(it, [submit(id, prompt, kind) for id, prompt in prompts.items()])
    assert vectors == {id: right(prompt, kind) for id, prompt in prompts.items()}
    assert ends == dict.fromkeys(prompts, STOP)
    assert all(token == -1 for out in outputs for token in out.tokens)


@pytest.mark.parametrize(("kind", "cached"), [("mean", 0), ("last", 28)])
def test_the_prefix_cache_is_read_only_where_states_are_not_missed(world: type[World], kind: Kind, cached: int) -> None:
    it = world()
    teach(it)
    prompt = list(range(30))
    first, _, _ = drive(it, [submit(1, prompt, kind)])
    again, _, outputs = drive(it, [submit(2, prompt, kind)])
    assert [started.cached_tokens for out in outputs for started in out.started] == [cached]
    assert first[1] == again[2] == right(prompt, kind)


def test_what_it_computed_serves_others(world: type[World]) -> None:
    it = world()
    teach(it)
    drive(it, [submit(1, list(range(30)), "mean")])
    it.add(range(30), max_tokens=1)
    it.run()
    assert list(it.started.values()) == [28]


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_preempted_ones_begin_anew(world: type[World], kind: Kind) -> None:
    """What was summed before the preemption is forgotten with the blocks."""
    it = world(limits=Limits(max_num_seqs=4, max_num_batched_tokens=9, max_model_len=1000))
    teach(it)
    prompt = [i % 40 for i in range(40)]
    it.engine.step([submit(1, prompt, kind)])
    it.engine.step()
    (sequence,) = it.engine._state.running
    assert sequence.num_computed == 18
    it.engine._phases.preempt(sequence, yields=False)
    vectors, ends, outputs = drive(it, [])
    assert (vectors, ends) == ({1: right(prompt, kind)}, {1: STOP})
    assert outputs[-1].stats.computed_tokens == 40 + (18 if kind == "mean" else 2)


def test_a_row_that_raises_or_is_not_finite_fails_alone(world: type[World]) -> None:
    it = world()
    teach(it)
    it.runner.raises = lambda row: row.tokens[0] == 30
    it.runner.spoiled = lambda row: row.tokens[0] == 31
    prompts = {id: [29 + id] * 9 for id in (1, 2, 3)}
    vectors, ends, _ = drive(it, [submit(id, prompt, "mean") for id, prompt in prompts.items()])
    assert vectors == {3: right(prompts[3], "mean")}
    assert ends == {1: FinishReason.ERROR, 2: FinishReason.ERROR, 3: STOP}


def test_an_aborted_one_brings_no_vector(world: type[World]) -> None:
    it = world(limits=Limits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=1000))
    teach(it)
    assert not it.engine.step([submit(1, list(range(20)), "mean")]).pooled
    vectors, ends, _ = drive(it, [Abort(1)])
    assert (vectors, ends) == ({}, {1: FinishReason.ABORT})


def test_it_generates_nothing(world: type[World]) -> None:
    it = world()
    pooling = Pooling(kind="mean", size=SIZE)
    for changes in ({"n": 2}, {"params": SamplingParams(max_tokens=1, seed=0, pooling=pooling)}):
        _, ends, _ = drive(it, [submit(len(it.submits) + 1, [1, 2], "mean", **changes)])
        assert set(ends.values()) == {FinishReason.ERROR}
