"""Steps in flight: the order of launching and reading, what sits a step out, and what is dropped, kept and repeated."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from model.batch import Row
from scheduler.flight import STALLED
from scheduler.limits import Limits
from scheduler.messages import FinishReason
from tests.scheduler.device import Launched
from tests.scheduler.test_grammar import constrained, said, say
from tests.scheduler.test_pooling import drive, right, submit, teach
from tests.scheduler.test_speculation import limits, parrot

if TYPE_CHECKING:
    from tests.scheduler.conftest import World


def asynchronous(world: type[World], **options: Any) -> World:
    return world(depth=1, **options)


def log(it: World) -> list[tuple[str, int]]:
    assert it.device is not None
    return it.device.log


def with_params(it: World, request: int, **changes: Any) -> int:
    params = msgspec.structs.replace(it.submits[request].params, **changes)
    it.submits[request] = it.inbox[-1] = msgspec.structs.replace(it.submits[request], params=params)
    return request


def test_depth_is_none_or_one(world: type[World]) -> None:
    with pytest.raises(ValueError, match="depth must be 0 or 1, not 2"):
        type(world().engine)(world().pool, world().runner, world().limits, lambda: 0.0, depth=2)


def test_a_step_is_launched_before_the_last_one_is_read(world: type[World]) -> None:
    it = asynchronous(world)
    it.add(range(9), max_tokens=4)
    it.run()
    assert log(it) == [
        ("launch", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
        ("read", 4),
    ]
    it.verify()


def test_a_limit_is_known_beforehand(world: type[World]) -> None:
    """Nobody computes a token too many for it, be it of max_tokens or of the context."""
    for depth in (0, 1):
        it = world(limits=Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=20), depth=depth)
        it.add(range(9), max_tokens=5)
        it.add(range(15), max_tokens=50)
        it.run()
        it.verify()
        assert sum(map(len, it.runner.batches)) == 10


def test_the_token_behind_a_stop_is_dropped_and_its_blocks_are_kept_so_long(world: type[World]) -> None:
    it = asynchronous(world)
    it.add(range(9), max_tokens=50)
    stop = it.expected(1, 0).tokens[3]
    it.streams.clear()
    it.inbox.clear()
    request = it.add(range(9), max_tokens=50, stops=(stop,))
    while it.streams[request, 0].finish is FinishReason.RUNNING:
        stats = it.step().stats
    assert log(it)[-2:] == [("launch", 5), ("read", 4)]
    assert (stats.running, stats.blocks_active) == (0, 4), "step 5 still writes to them"
    assert stats.tokens_active == 13
    assert it.engine.has_work
    assert it.step().stats.blocks_active == 0
    assert log(it)[-1] == ("read", 5)
    assert not it.engine.has_work
    del it.submits[1]
    it.verify()


def test_aborted_in_flight(world: type[World]) -> None:
    it = asynchronous(world)
    it.add(range(9), max_tokens=50)
    it.add(range(20, 29), max_tokens=50)
    for _ in range(4):
        it.step()
    active = it.step().stats.blocks_active
    it.abort(1)
    assert it.step().stats.blocks_active < active, "its last step was read"
    it.run()
    it.verify()
    # Alone: there is nothing to launch, and what is in flight is read at once.
    it.add(range(9), max_tokens=50)
    for _ in range(4):
        it.step()
    it.abort(3)
    assert it.step().stats.blocks_active == 0
    assert not it.engine.has_work


WAITING: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5},
    {"bad_words": ((1, 2),)},
]


@pytest.mark.parametrize("changes", WAITING, ids=lambda changes: next(iter(changes)))
def test_whose_draws_need_the_last_token_sits_a_step_out(world: type[World], changes: dict[str, Any]) -> None:
    it = asynchronous(world, blocks=200)
    other, *_ = (it.add(range(20 + i, 29), max_tokens=40) for i in range(2 * STALLED))
    special = with_params(it, it.add(range(9), max_tokens=6), **changes)
    calls: dict[int, list[int]] = {other: [], special: []}
    for number in range(50):
        for request in it.step().ids:
            calls.get(request, []).append(number)
    it.run()
    it.verify()
    assert {b - a for a, b in itertools.pairwise(calls[other])} == {1}
    assert {b - a for a, b in itertools.pairwise(calls[special])} == {2}


def test_alone_nobody_sits_out(world: type[World]) -> None:
    """Each step is read before the next one is planned: no call of step() comes to nothing."""
    it = asynchronous(world)
    with_params(it, it.add(range(9), max_tokens=6), presence_penalty=0.5)
    it.step()
    for _ in range(5):
        assert len(it.step().ids) == 1
    it.run()
    assert log(it)[:4] == [("launch", 1), ("read", 1), ("launch", 2), ("read", 2)]


def test_what_may_be_drawn_is_as_before(world: type[World]) -> None:
    """min_tokens and a bias need no token that was drawn: only how many there are."""
    it = asynchronous(world)
    it.add(range(9), max_tokens=30, stops=tuple(range(0, 40, 3)), min_tokens=12)
    with_params(it, it.add(range(20, 29), max_tokens=9), logit_bias={3: 1.0}, allowed_token_ids=(1, 2, 3))
    it.run()
    it.verify()
    assert log(it)[:3] == [("launch", 1), ("launch", 2), ("read", 1)]


def test_grammars(world: type[World]) -> None:
    texts = []
    for depth in (0, 1):
        it = constrained(world(depth=depth))
        ids = [say(it, pattern, [1, 2, 3], max_tokens=30, n=2) for pattern in ("(abc){3,9}", "[a-c]{20}z", "abc")]
        plain = it.add([1, 2, 3], max_tokens=30)
        it.run()
        texts.append([said(it, id, index) for id in ids for index in range(2)])
        assert it.streams[plain, 0] == it.expected(plain, 0)
    assert texts[0] == texts[1]


def test_siblings_begin_once_the_first_token_is_read(world: type[World]) -> None:
    it = asynchronous(world)
    it.add(range(9), max_tokens=6, n=4)
    it.run()
    it.verify()
    assert [len(rows) for rows in it.runner.batches] == [1, 4, 4, 4, 4, 4, 3]


def test_drafts(world: type[World]) -> None:
    """A row with a draft is read before it goes on; a text that never repeats is never waited for."""
    it = asynchronous(world, limits=limits(8))
    it.runner.draw = parrot
    it.add([number % 12 for number in range(9)], max_tokens=200)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.accepted_tokens > 20
    plain = asynchronous(world, limits=limits(8))
    plain.runner.draw = lambda tokens, params, index: len(tokens)
    plain.add([1, 2, 3], max_tokens=30)
    plain.run()
    waits = [a for a, b in itertools.pairwise(log(plain)) if (a[0], b) == ("read", ("launch", a[1] + 1))]
    assert waits == []


def test_a_pooled_prompt_of_several_parts(world: type[World]) -> None:
    it = asynchronous(world, limits=Limits(max_num_seqs=4, max_num_batched_tokens=7, max_model_len=1000))
    teach(it)
    prompt = [number % 40 for number in range(30)]
    vectors, _, _ = drive(it, [submit(1, prompt, "mean"), submit(2, prompt[::-1], "last")])
    assert vectors == {1: right(prompt, "mean"), 2: right(prompt[::-1], "last")}


def test_a_prompt_that_others_share_is_waited_for_in_flight(world: type[World]) -> None:
    it = asynchronous(world, limits=Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=1000))
    for last in range(3):
        it.add([*range(32), last], max_tokens=3)
    it.run()
    it.verify()
    assert it.started == {1: 0, 2: 32, 3: 32}


def test_preemption_reads_first(world: type[World], hopeful: None) -> None:
    it = asynchronous(world, blocks=8, limits=Limits(4, 64, 32, watermark=0.0))
    for start in range(0, 400, 100):
        it.add([start % 40, 1, 2], max_tokens=20, seed=start)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.preemptions > 0


@pytest.mark.parametrize("places", [[4], [4, 5], [6, 13, 14]])
def test_a_step_that_fails_takes_the_one_behind_it_along(world: type[World], places: list[int]) -> None:
    """Both are computed again, and nobody notices."""
    it = asynchronous(world)
    steps = 0

    def raises(row: Row) -> bool:
        nonlocal steps
        steps += row.tokens[0] == 0
        return row.tokens[0] == 0 and steps in places

    it.runner.raises = raises
    for start in range(5):
        it.add(range(start, 9), max_tokens=20, n=1 + start % 2)
    it.add(range(100, 160), max_tokens=3, prompt_logprobs=0)
    it.run()
    it.verify()
    assert steps > max(places)


def test_a_guilty_row_fails_alone(world: type[World]) -> None:
    it = asynchronous(world)
    it.runner.raises = lambda row: row.tokens[0] == 2 and len(row.tokens) >= 12
    for start in range(5):
        it.add(range(start, 9), max_tokens=20)
    it.run()
    for (request, _), stream in it.streams.items():
        expected = it.expected(request, 0)
        if request == 3:
            assert stream.error == "the model failed on this request"
            assert stream.tokens == expected.tokens[:5]
        else:
            assert stream == expected
    assert it.last is not None
    assert it.last.stats.failed_raised == 1


def test_bad_logits_in_flight(world: type[World]) -> None:
    """Whatever the next step began with, nobody looks at it."""
    it = asynchronous(world)
    it.runner.spoiled = lambda row: row.tokens[0] == 2 and len(row.tokens) >= 12
    it.runner.muted = lambda row: row.tokens[0] == 3 and len(row.tokens) == 12
    for start in range(5):
        it.add(range(start, 9), max_tokens=20)
    it.run()
    for (request, _), stream in it.streams.items():
        expected = it.expected(request, 0)
        if request == 3:
            assert "not finite" in stream.error
        elif request == 4:
            assert stream == replace(expected, tokens=expected.tokens[:6], finish=FinishReason.STOP)
        else:
            assert stream == expected
    assert it.last is not None
    assert it.last.stats.failed_logits == 1


def test_a_step_fails_that_has_the_surplus_row_of_somebody_who_has_ended(world: type[World]) -> None:
    """Its first token never came; it is computed again with any other, or not at all."""
    it = asynchronous(world)
    faults = iter([True])
    it.runner.raises = lambda row: len(row.tokens) == 12 and row.tokens[0] == 1 and next(faults, False)
    ended = it.add(range(9), max_tokens=50)
    stop = it.expected(ended, 0).tokens[3]
    with_params(it, ended, stop_token_ids=(stop,))
    it.add(range(1, 9), max_tokens=20)
    it.run()
    it.verify()
    assert len(it.streams[ended, 0].tokens) == 4
    assert next(faults, None) is None


def test_a_step_is_not_kept_by_those_behind_it(world: type[World]) -> None:
    it = asynchronous(world)
    it.add(range(9), max_tokens=50)
    seen: weakref.WeakSet[Launched] = weakref.WeakSet()
    assert it.device is not None
    for _ in range(30):
        it.step()
        seen.update(it.device.flying)
    gc.collect()
    assert len(seen) <= 2
