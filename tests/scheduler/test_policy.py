"""plan() on small situations; it must read and change nothing."""

from __future__ import annotations

import pytest

from kvpool.pool import KVPool
from scheduler.budget import Budget
from scheduler.limits import Limits
from scheduler.messages import SamplingParams, Submit
from scheduler.policy import Plan, SchedulerState, plan
from scheduler.sequence import Phase, Request, Sequence


class Scene:
    """A state put together by hand."""

    def __init__(self, blocks: int = 20_000, tokens: int = 64, **limits: int | float) -> None:
        values: dict[str, int | float] = {"max_num_seqs": 8, "max_model_len": 100_000, "watermark": 0.0, **limits}
        self.limits = Limits(max_num_batched_tokens=tokens, **values)  # type: ignore[arg-type]
        self.state = SchedulerState(KVPool(blocks + 1, 4), self.limits)
        self.budget = Budget(tokens, self.limits.min_chunk)
        self.made = 0

    def sequence(self, prompt: list[int] | int, priority: int = 0, max_tokens: int = 8, n: int = 1) -> Sequence:
        self.made += 1
        ids = [1000 * self.made + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        submit = Submit(id=self.made, prompt_ids=ids, params=params, n=n, priority=priority, arrival=float(self.made))
        return Request(submit, 100_000).sequences[0]

    def wait(self, prompt: list[int] | int, priority: int = 0, max_tokens: int = 8) -> Sequence:
        sequence = self.sequence(prompt, priority, max_tokens)
        self.state.waiting.add(sequence)
        return sequence

    def run(self, prompt: list[int] | int, computed: int, priority: int = 0, max_tokens: int = 8) -> Sequence:
        sequence = self.sequence(prompt, priority, max_tokens)
        sequence.phase = Phase.RUNNING
        sequence.num_computed = computed
        assert self.state.pool.extend(sequence.table, computed, 0)
        self.state.pool.hashes(sequence.tokens, sequence.salt, sequence.hashes)
        self.state.pool.commit(sequence.table, sequence.tokens, computed, b"")
        sequence.chunked = len(sequence.tokens) - computed > 1
        self.state.running.append(sequence)
        return sequence

    def plan(self) -> Plan:
        """Of the state as it is, which must be the same afterwards."""
        everybody = [*self.state.running, *self.state.waiting]
        before = [(s.num_computed, s.phase, list(s.table.blocks), list(s.tokens)) for s in everybody]
        usage, order = self.state.pool.usage(), list(self.state.waiting)
        first = plan(self.state, self.budget, 0.0)
        again = plan(self.state, self.budget, 0.0)
        assert (first.counts, first.admitted, first.victim) == (again.counts, again.admitted, again.victim)
        assert before == [(s.num_computed, s.phase, list(s.table.blocks), list(s.tokens)) for s in everybody]
        assert (usage, order) == (self.state.pool.usage(), list(self.state.waiting))
        return first


def counts(step: Plan, *sequences: Sequence) -> list[int]:
    return [step.counts.get(s, 0) for s in sequences]


def test_decodes_come_first_and_are_counted() -> None:
    scene = Scene(tokens=20)
    chunk = scene.run(100, 8)
    decodes = [scene.run(5, 4) for _ in range(3)]
    waiting = scene.wait(50)
    step = scene.plan()
    assert list(step.counts)[:3] == decodes
    assert counts(step, *decodes) == [1, 1, 1]
    assert counts(step, chunk, waiting) == [9, 8]
    assert list(step.admitted) == [waiting]
    assert (step.work.rows, step.work.context, step.work.prefill) == (3, 12, 17)
    assert step.work.product == 9 * (8 + 4.5) + 8 * 4


def test_oldest_gets_half_and_short_ones_the_rest() -> None:
    scene = Scene(tokens=100)
    long = scene.run(5000, 40)
    medium, short, shorter = scene.wait(400), scene.wait(30), scene.wait(10)
    assert counts(scene.plan(), long, medium, short, shorter) == [50, 10, 30, 10]


def test_what_short_ones_leave_goes_back_to_the_oldest() -> None:
    scene = Scene(tokens=100)
    long, short = scene.run(5000, 40), scene.wait(10)
    assert counts(scene.plan(), long, short) == [90, 10]


def test_head_of_a_long_queue_and_a_short_one_behind() -> None:
    scene = Scene(tokens=64)
    long = scene.wait(5000)
    many = [scene.wait(4000) for _ in range(20)]
    short = scene.wait(12)
    step = scene.plan()
    assert counts(step, long, short) == [32, 12]
    assert counts(step, *many)[0] == 20, "what is left begins one more, not all of them"
    assert sum(counts(step, *many)) == 20


def test_priority_before_length() -> None:
    scene = Scene(tokens=64)
    running = scene.run(5000, 40)
    low = scene.wait(10, priority=1)
    high = scene.wait(500, priority=-1)
    assert counts(scene.plan(), running, low, high) == [32, 0, 32]


def test_seats() -> None:
    scene = Scene(max_num_seqs=3)
    scene.run(5, 4)
    first, second, third = (scene.wait(5) for _ in range(3))
    step = scene.plan()
    assert list(step.admitted) == [first, second]
    assert third not in step.counts
    assert not step.closed


def test_small_token_budgets() -> None:
    scene = Scene(tokens=2)
    decodes = [scene.run(5, 4) for _ in range(4)]
    step = scene.plan()
    assert counts(step, *decodes) == [1, 1, 0, 0]
    assert step.crowded
    scene = Scene(tokens=14)
    decodes = [scene.run(5, 4) for _ in range(8)]
    prompt = scene.run(50, 8)
    step = scene.plan()
    assert sum(counts(step, *decodes)) == 6
    assert step.counts[prompt] == 8


def test_youngest_of_the_lowest_priority_makes_room() -> None:
    scene = Scene(blocks=4)
    scene.run(5, 4)
    old_low = scene.run(5, 4, priority=1)
    young_low = scene.run(5, 4, priority=1)
    scene.run(5, 4)
    assert scene.plan().victim is young_low
    young_low.preemptions = scene.limits.max_preemptions
    assert scene.plan().victim is old_low, "the other is protected"
    for sequence in scene.state.running:
        sequence.preemptions = scene.limits.max_preemptions
    assert scene.plan().victim is young_low, "all are"


def test_chunks_make_room_too_and_admissions_do_not() -> None:
    scene = Scene(blocks=4)
    prompt = scene.run(12, 8)
    young = scene.run(9, 8)
    assert scene.plan().victim is young
    scene = Scene(blocks=4)
    scene.run(8, 7)
    waiting = scene.wait(12)
    step = scene.plan()
    assert step.victim is None
    assert waiting not in step.counts
    assert step.closed
    assert prompt.phase is Phase.RUNNING


def test_peak_estimate_keeps_out() -> None:
    scene = Scene(blocks=30)
    scene.run(40, 39, max_tokens=60)
    waiting = scene.wait(8, max_tokens=60)
    step = scene.plan()
    assert waiting not in step.counts
    assert step.closed
    scene.state.closed = True
    scene.wait(4, max_tokens=1)
    assert len(scene.plan().counts) == 1, "closed until something ends or arrives"
    scene.state.closed = False
    step = scene.plan()
    assert len(step.admitted) == 1, "a look past the head"
    assert step.passed is waiting


def test_look_ahead_is_bounded() -> None:
    scene = Scene(blocks=30)
    scene.run(40, 39, max_tokens=60)
    head = scene.wait(8, max_tokens=60)
    scene.wait(4, max_tokens=1)
    head.bypasses = scene.limits.max_bypasses
    step = scene.plan()
    assert not step.admitted
    assert step.closed


def test_nobody_passes_a_preempted_one() -> None:
    scene = Scene(blocks=30)
    scene.run(40, 39, max_tokens=60)
    preempted = scene.sequence(8, max_tokens=60)
    preempted.preempted = True
    scene.state.waiting.add(preempted)
    fresh = scene.wait(4, max_tokens=1)
    step = scene.plan()
    assert not step.admitted
    scene = Scene()
    for sequence in (preempted, fresh):
        scene.state.waiting.add(sequence)
    step = scene.plan()
    assert list(step.admitted) == [preempted], "fresh ones wait one step longer"


def test_alone_it_is_admitted_whatever_the_estimate_says() -> None:
    scene = Scene(blocks=30)
    head, second = scene.wait(40, max_tokens=5000), scene.wait(4, max_tokens=1)
    step = scene.plan()
    assert list(step.admitted) == [head]
    assert second not in step.counts


def test_prefix_hit_at_admission() -> None:
    scene = Scene()
    shared = list(range(40))
    running = scene.run([*shared, 99], 40)
    scene.state.pool.commit(running.table, running.tokens, 40, b"")
    step = scene.plan()
    waiting = scene.wait([*shared, 77, 78])
    step = scene.plan()
    assert step.admitted[waiting].tokens == 40
    assert step.counts[waiting] == 2


def test_waits_for_a_prefix_that_is_being_computed() -> None:
    scene = Scene(tokens=120)
    shared = list(range(80))
    leader = scene.run([*shared, 99], 16)
    follower = scene.wait([*shared, 77])
    stranger = scene.wait(30)
    step = scene.plan()
    assert follower not in step.counts
    assert stranger in step.admitted, "and others pass"
    leader.chunked = False
    assert follower in scene.plan().admitted, "a leader that does not advance is not waited for"


def test_a_wave_begins_with_one() -> None:
    scene = Scene(tokens=64)
    wave = [scene.wait([*range(40), 100 + i]) for i in range(5)]
    step = scene.plan()
    assert list(step.admitted) == [wave[0]]


def test_copy_on_write_is_counted() -> None:
    scene = Scene(blocks=2)
    leader = scene.sequence(6, n=2)
    sibling = leader.request.sequences[1]
    leader.request.unborn = []
    scene.state.pool.extend(leader.table, 6, 0)
    leader.num_computed = 6
    leader.tokens.append(5)
    sibling.table = scene.state.pool.fork(leader.table)
    sibling.num_computed = 5
    scene.state.running += [leader, sibling]
    assert scene.plan().victim is sibling
    scene.state.pool.release(sibling.table)
    scene.state.running.pop()
    assert scene.plan().victim is None


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, not 0"):
        Scene(max_num_seqs=0)
