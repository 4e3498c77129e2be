"""What a bad row may do to its neighbours: nothing."""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING

import pytest

from model.batch import Batch, Row
from model.params import SamplingParams
from scheduler.isolation import Broken, collect, launch
from scheduler.messages import FinishReason

if TYPE_CHECKING:
    from tests.scheduler.conftest import World


def test_bad_logits_end_one_row(world: type[World]) -> None:
    it = world()
    for start in (0, 100, 200):
        it.add(range(start, start + 9), max_tokens=6)
    it.step()
    it.runner.spoiled = lambda row: row.tokens[0] == 100
    it.run()
    assert it.streams[2, 0].error == "the model's logits for this request are not finite"
    for request in (1, 3):
        assert it.streams[request, 0] == it.expected(request, 0)


def test_bad_logits_at_the_prompt_end_all_siblings(world: type[World]) -> None:
    it = world()
    it.runner.spoiled = lambda row: True
    it.add(range(9), n=3)
    it.run()
    assert all("not finite" in stream.error for stream in it.streams.values())


def test_row_whose_masks_leave_no_token_ends_and_its_siblings_too(world: type[World]) -> None:
    it = world()
    it.runner.muted = lambda row: row.tokens[0] == 100 and len(row.tokens) > 10
    it.add(range(100, 109), n=3, max_tokens=20)
    it.add(range(9), max_tokens=20)
    it.run()
    for index in range(3):
        stream = it.streams[1, index]
        assert stream.finish is FinishReason.STOP
        assert stream.tokens == it.expected(1, index).tokens[:2]
    assert it.streams[2, 0] == it.expected(2, 0)


def test_raising_row_fails_alone(world: type[World], caplog: pytest.LogCaptureFixture) -> None:
    """Its client learns that, and the log what the exception says."""
    it = world()
    for start in range(0, 700, 100):
        it.add(range(start, start + 9), max_tokens=6, n=2)
    it.step()
    it.runner.raises = lambda row: row.tokens[0] in (200, 500) and row.index == 1
    it.run()
    for (request, index), stream in it.streams.items():
        if request in (3, 6) and index == 1:
            assert stream.error == "the model failed on this request"
        else:
            assert stream == it.expected(request, index)
    assert "Traceback" in caplog.text
    assert "ValueError: row at 8" in caplog.text


def test_raising_once_costs_nobody_anything(world: type[World]) -> None:
    it = world()
    rng = random.Random(0)
    it.runner.raises = lambda row: rng.random() < 0.02
    for start in range(0, 700, 100):
        it.add(range(start, start + 9), max_tokens=20, n=2)
    it.run()
    failed = [stream for stream in it.streams.values() if stream.error]
    assert len(failed) < 14
    for (request, index), stream in it.streams.items():
        assert stream.error or stream == it.expected(request, index)


def test_broken_runner_is_not_hidden(world: type[World]) -> None:
    it = world()
    it.runner.raises = lambda row: True
    for number in range(7):
        it.add(range(number, 9), max_tokens=3)
        it.step()
    it.add(range(9))
    with pytest.raises(RuntimeError, match="8 steps in a row failed"):
        it.step()


def test_a_single_row_is_tried_again_too(world: type[World]) -> None:
    it = world()
    faults = iter([True, False, False, True])
    it.runner.raises = lambda row: next(faults, False)
    it.add(range(9), max_tokens=20)
    it.run()
    assert next(faults, None) is None
    assert it.streams[1, 0] == it.expected(1, 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "raised"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (ValueError("out of memory, it says"), "raised"),
    ],
)
def test_failures_are_counted_by_reason(world: type[World], error: Exception, reason: str) -> None:
    it = world()

    def guilty(row: Row) -> bool:
        if row.tokens[0] == 100:
            raise error
        return False

    it.runner.raises = guilty
    it.add(range(100, 109), n=2)
    it.add(range(9))
    it.run()
    assert it.last is not None
    stats = it.last.stats
    found = {name: getattr(stats, f"failed_{name}") for name in ("raised", "memory", "logits", "grammar")}
    assert found == dict.fromkeys(found, 0) | {reason: 1}  # the sibling was not born yet
    assert it.streams[2, 0] == it.expected(2, 0)


def test_what_ran_out_of_memory_has_it_back_when_it_is_tried_again() -> None:
    """An exception holds the frames that it passed, and those hold the step's tensors."""

    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []

    class Short:
        def execute(self, batch: Batch) -> Broken:
            alive = [it for it in held if it() is not None]
            assert not alive, "held by an exception"
            tensor = Tensor()
            held.append(weakref.ref(tensor))
            raise MemoryError

    rows = [Row([1], 1, 0, 1, [1], SamplingParams(max_tokens=1, seed=0)) for _ in range(4)]
    executor, batch = Short(), Batch(rows)
    outcome = collect(executor, batch, launch(executor, batch))
    assert len(held) == 1 + 2 + 4
    assert sorted(outcome.failures) == [0, 1, 2, 3]
    assert all(isinstance(error, MemoryError) for error in outcome.failures.values())


def test_a_lost_device_is_nobody_s_fault(world: type[World]) -> None:
    """No request fails: whoever runs the engine starts it anew, and they go on."""
    it = world()

    def guilty(row: Row) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    it.runner.raises = guilty
    it.add(range(9))
    with pytest.raises(RuntimeError, match="the device is lost"):
        it.step()
    assert not any(stream.error for stream in it.streams.values())
