"""Engine.step(): what clients see, situation by situation. The oracle of the conftest says what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler.limits import Limits
from scheduler.messages import FinishReason

if TYPE_CHECKING:
    from tests.scheduler.conftest import World


def limits(tokens: int = 64, seqs: int = 16, length: int = 10_000, switch: int | None = None) -> Limits:
    return Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, rope_switch=switch)


# ---- the life of a request ----


def test_one_request(world: type[World]) -> None:
    it = world()
    request = it.add(range(10), max_tokens=5, logprobs=0)
    assert not it.engine.has_work
    output = it.step()
    assert it.engine.has_work
    assert [(s.id, s.cached_tokens) for s in output.started] == [(request, 0)]
    assert (output.stats.running, output.stats.waiting, output.stats.computed_tokens) == (1, 0, 10)
    assert (output.stats.blocks_active, output.stats.tokens_active) == (3, 10)
    assert (output.stats.step_tokens, output.stats.step_rows) == (10, 1)
    it.run()
    it.verify()
    assert it.runner.batches == [[(0, 10)], [(10, 1)], [(11, 1)], [(12, 1)], [(13, 1)]]


def test_stop_token_is_the_last_token(world: type[World]) -> None:
    it = world()
    request = it.add([1, 2, 3], max_tokens=500, stops=tuple(range(0, 40, 3)))
    it.run()
    it.verify()
    stream = it.streams[request, 0]
    assert stream.finish is FinishReason.STOP
    assert stream.tokens[-1] % 3 == 0


def test_chunks(world: type[World]) -> None:
    it = world(limits=limits(tokens=7))
    it.add(range(30), max_tokens=2)
    it.run()
    it.verify()
    assert it.runner.batches == [[(0, 7)], [(7, 7)], [(14, 7)], [(21, 7)], [(28, 2)], [(30, 1)]]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_prompt_only(world: type[World], n: int, prompt_logprobs: int | None) -> None:
    it = world(limits=limits(tokens=7))
    it.add(range(20), max_tokens=0, n=n, prompt_logprobs=prompt_logprobs)
    it.run()
    it.verify()
    assert [stream.finish for stream in it.streams.values()] == [FinishReason.LENGTH] * n
    assert len(it.runner.batches) == 3


def test_length_at_the_context(world: type[World]) -> None:
    it = world(limits=limits(length=20))
    it.add(range(15), max_tokens=10_000)
    it.run()
    it.verify()
    assert len(it.streams[1, 0].tokens) == 5


def test_length_at_the_pool(world: type[World]) -> None:
    it = world(blocks=5)
    it.add(range(15), max_tokens=10_000)
    it.add(range(100, 115), max_tokens=10_000, n=2)
    it.run()
    it.verify()
    assert {len(stream.tokens) for stream in it.streams.values()} == {5}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (20, 1, "prompt: needs 6 blocks of 4 tokens, the pool has 5"),
        (30, 0, "prompt: 30 tokens, the context holds 25 with the generated ones"),
        (25, 1, "prompt: 25 tokens, the context holds 25 with the generated ones"),
        (0, 1, "prompt: it is empty; at least one token is needed"),
    ],
)
def test_refusals(world: type[World], prompt: int, max_tokens: int, message: str) -> None:
    it = world(blocks=5, limits=limits(length=25))
    it.add(range(prompt), max_tokens=max_tokens, n=2)
    canary = it.add(range(5), max_tokens=2)
    it.step()
    assert [it.streams[1, i].error for i in range(2)] == [message] * 2
    it.run()
    assert it.streams[canary, 0] == it.expected(canary, 0)


def test_prompt_that_just_fits(world: type[World]) -> None:
    it = world(blocks=5)
    it.add(range(19), max_tokens=9)
    it.add(range(20), max_tokens=0)
    it.run()
    it.verify()


def test_second_submit_of_an_id_is_ignored(world: type[World]) -> None:
    it = world()
    it.add(range(5), max_tokens=3)
    it.inbox *= 2
    it.run()
    it.verify()


# ---- aborts ----


def test_abort_anywhere(world: type[World]) -> None:
    for delay in range(9):
        it = world(blocks=20, limits=limits(tokens=7, seqs=2))
        for start in (0, 100, 200):
            it.add(range(start, start + 20), max_tokens=4, n=1 + start // 100)
        for _ in range(delay):
            it.step()
        for request in (1, 2, 3, 99):
            it.abort(request)
        output = it.step()
        assert (output.stats.running, output.stats.waiting, output.stats.blocks_active) == (0, 0, 0)
        it.run()
        it.verify()


def test_abort_of_the_leader_passes_the_prompt_on(world: type[World]) -> None:
    it = world(limits=limits(tokens=7))
    it.add(range(20), max_tokens=4, n=3, prompt_logprobs=0)
    it.step()
    it.abort(1, 0)
    it.run()
    it.verify()
    assert [it.streams[1, i].finish for i in range(3)] == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]


def test_abort_of_one_sequence(world: type[World]) -> None:
    it = world()
    it.add(range(20), max_tokens=6, n=3)
    it.step()
    it.step()
    it.abort(1, 1)
    it.abort(1, 7)
    it.run()
    it.verify()
    assert it.streams[1, 1].finish is FinishReason.ABORT
    assert it.streams[1, 2].finish is FinishReason.LENGTH


def test_message_only_steps_report(world: type[World]) -> None:
    it = world()
    output = it.step()
    assert output.ids == []
    it.add(range(20), max_tokens=6)
    it.abort(1)
    output = it.step()
    assert output.finishes == [FinishReason.ABORT]
    assert output.stats.steps == 0


# ---- n > 1 ----


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_fork(world: type[World], length: int, caching: bool) -> None:
    it = world(prefix_caching=caching)
    it.add(range(length), max_tokens=9, n=4)
    it.run()
    it.verify()
    assert it.runner.batches[0] == [(0, length)], "one prefill"
    assert sorted(it.runner.batches[1]) == [(length - 1, 1)] * 3 + [(length, 1)]
    assert len({tuple(stream.tokens) for stream in it.streams.values()}) == 4


def test_fork_when_the_leader_ends_at_its_first_token(world: type[World]) -> None:
    for length in (5, 8):
        it = world()
        it.add(range(length), max_tokens=1, n=3)
        it.run()
        it.verify()
        assert len(it.runner.batches) == 2


def test_siblings_without_a_seat_wait(world: type[World]) -> None:
    it = world(limits=limits(seqs=2))
    it.add(range(9), max_tokens=5, n=5)
    output = it.step()
    assert output.stats.running == 2
    assert output.stats.waiting == 3
    it.run()
    it.verify()


# ---- resuming ----


@pytest.mark.parametrize("n", [1, 3])
def test_resume_at_any_token(world: type[World], n: int) -> None:
    whole = world()
    whole.add(range(10), max_tokens=8, n=n, stops=(5, 9, 11))
    whole.run()
    for cut in range(9):
        it = world(limits=limits(tokens=7))
        generated = [whole.streams[1, i].tokens[: cut + i] for i in range(n)]
        it.add(range(10), max_tokens=8, n=n, generated=generated, stops=(5, 9, 11), prompt_logprobs=0)
        it.run()
        it.verify()
        assert [it.streams[1, i] for i in range(n)] == [whole.streams[1, i] for i in range(n)]
        assert bool(it.prompt_values) == (n == 1 and cut == 0)


def test_resumed_siblings_share_their_prompt(world: type[World]) -> None:
    it = world()
    it.add(range(40), max_tokens=8, n=4, generated=[[], [], [], [3]])
    it.run()
    assert it.last is not None
    assert it.last.stats.computed_tokens < 40 + 4 * 8


def test_resumed_where_less_fits(world: type[World]) -> None:
    """An engine that has less room than the one before it: what no longer fits ends there, by its length."""
    whole = world()
    whole.add(range(10), max_tokens=40)
    whole.run()
    told = whole.streams[1, 0].tokens
    for had in (0, 5, 14, 30):
        it = world(blocks=6)
        it.add(range(10), max_tokens=40, generated=[told[:had]])
        it.run()
        assert it.streams[1, 0].finish is FinishReason.LENGTH
        assert it.streams[1, 0].tokens == told[: max(had, 14)]


# ---- prefixes ----


def test_second_turn_hits(world: type[World]) -> None:
    it = world()
    first = it.add(range(20), max_tokens=9)
    it.run()
    it.add([*range(20), *it.streams[first, 0].tokens, 1, 2], max_tokens=3)
    it.add(range(20), max_tokens=3, salt=b"other")
    it.run()
    it.verify()
    assert it.started == {1: 0, 2: 28, 3: 0}


def test_whole_prompt_cached_leaves_one_token(world: type[World]) -> None:
    it = world()
    for length in (7, 8, 9, 8, 9):
        it.add(range(length), max_tokens=1)
        it.run()
    it.verify()
    assert it.started == {1: 0, 2: 4, 3: 8, 4: 4, 5: 8}


def test_wave_computes_its_prefix_once(world: type[World]) -> None:
    it = world(blocks=400, limits=limits(tokens=32, seqs=32))
    for number in range(24):
        it.add([*range(100), 500 + number, number], max_tokens=4)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.computed_tokens == 102 + 23 * 2
    assert it.last.stats.prefix_hit_tokens == 23 * 100


def test_leader_of_a_wave_goes_away(world: type[World]) -> None:
    it = world(blocks=400, limits=limits(tokens=32))
    for number in range(6):
        it.add([*range(100), 500 + number], max_tokens=4)
    it.step()
    it.abort(1)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.computed_tokens <= 101 + 5 * 8


def test_aborted_prefill_leaves_sound_blocks(world: type[World]) -> None:
    it = world(limits=limits(tokens=7))
    it.add(range(40), max_tokens=4)
    for _ in range(3):
        it.step()
    it.abort(1)
    it.add(range(40), max_tokens=4)
    it.run()
    it.verify()
    assert it.started[2] == 20


def test_prompt_logprobs_read_no_cache(world: type[World]) -> None:
    it = world(limits=limits(tokens=7))
    it.add(range(30), max_tokens=2)
    it.run()
    it.add(range(30), max_tokens=2, prompt_logprobs=0)
    it.run()
    it.verify()
    assert it.started == {1: 0, 2: 0}


@pytest.mark.usefixtures("hopeful")
def test_prompt_logprobs_survive_preemption(world: type[World]) -> None:
    it = world(blocks=12, limits=limits(tokens=4))
    it.add(range(10), max_tokens=30, priority=-1)
    it.step()
    it.step()
    it.add(range(100, 130), max_tokens=2, prompt_logprobs=0)
    it.run()
    it.verify()
    assert it.last is not None
    assert it.last.stats.preemptions > 0


def test_rope_switch_computes_anew(world: type[World]) -> None:
    it = world(limits=limits(switch=12))
    it.add(range(10), max_tokens=8, n=2)
    it.add(range(12), max_tokens=8)
    it.add(range(13), max_tokens=8)
    it.run()
    it.add(range(10), max_tokens=1)
    it.add(range(14), max_tokens=1)
    it.run()
    it.verify()
    assert (it.started[4], it.started[5]) == (8, 12)


# ---- statistics ----


def test_statistics(world: type[World]) -> None:
    it = world(limits=limits(seqs=2))
    for start in (0, 100, 200):
        it.add(range(start, start + 10), max_tokens=4)
    stats = it.step().stats
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 1, 10)
    assert (stats.blocks_total, stats.blocks_active, stats.tokens_active) == (64, 6, 20)
    assert stats.step_seconds == pytest.approx(0.001)
    assert (stats.steps, stats.step_rows, stats.step_tokens) == (1, 2, 20)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (20, 0)


@pytest.mark.parametrize("ending", ["length", "abort"])
def test_an_end_lets_the_next_one_in(world: type[World], ending: str) -> None:
    """Admission that found no room looks again as soon as somebody ends, not when everybody has."""
    it = world(blocks=24)
    it.add([1] * 20, max_tokens=40)
    second = it.add([2] * 20, max_tokens=10 if ending == "length" else 20)
    third = it.add([3] * 40, max_tokens=8)
    while it.streams[second, 0].finish is FinishReason.RUNNING:
        it.step()
        assert third not in it.started or it.streams[second, 0].finish is not FinishReason.RUNNING
        if ending == "abort" and len(it.streams[second, 0].tokens) == 5:
            it.abort(second)
    it.step()
    assert third in it.started
    assert it.streams[1, 0].finish is FinishReason.RUNNING
    it.run()
    it.verify()
