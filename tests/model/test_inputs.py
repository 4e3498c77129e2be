"""Packing rows into tensors, against the definition written as loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.batch import Batch, Row
from model.inputs import InputBuilder, draws
from model.params import SamplingParams

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=1, seed=0)
SIZE = 16


def row(start: int, count: int, *, rest: int = 0, first_block: int = 1, samples: bool = True, spare: int = 0) -> Row:
    """Tokens are told apart by their block and position; `rest` more are known than computed."""
    length = start + count + rest
    blocks = list(range(first_block, first_block + -(-length // SIZE) + spare))
    return Row([1000 * first_block + i for i in range(length)], length, start, count, blocks, PARAMS, samples=samples)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    return [
        row(
            draw(st.integers(0, 70)),
            draw(st.integers(1, 40)),
            rest=draw(st.sampled_from([0, 0, 3, 30])),
            first_block=1 + 20 * number,
            samples=draw(st.booleans()),
            spare=draw(st.integers(0, 2)),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(rows=batches())
def test_every_token_is_where_it_belongs(rows: list[Row]) -> None:
    inputs = InputBuilder(512, SIZE, CPU).build(Batch(rows))
    flat = [(r, position) for r in rows for position in range(r.start, r.start + r.count)]
    assert inputs.token_ids.tolist() == [r.tokens[p] for r, p in flat]
    assert inputs.positions.tolist() == [p for _, p in flat]
    assert inputs.blocks.tolist() == [r.blocks[p // SIZE] for r, p in flat]
    assert inputs.offsets.tolist() == [p % SIZE for _, p in flat]
    assert inputs.lengths.tolist() == [len(r.tokens) for r, _ in flat]
    assert inputs.starts.tolist() == [r.start for r in rows]
    assert inputs.counts.tolist() == [r.count for r in rows]
    assert inputs.contexts.tolist() == [r.start + r.count for r in rows]
    last = [sum(r.count for r in rows[: n + 1]) - 1 for n, r in enumerate(rows) if draws(r)]
    assert inputs.sampled.tolist() == last
    for number, r in enumerate(rows):
        needed = -(-(r.start + r.count) // SIZE)
        padded = r.blocks[:needed] + [0] * (inputs.tables.shape[1] - needed)
        assert inputs.tables[number].tolist() == padded
    opened = []
    for r in rows:
        end = r.start + r.count
        if end % SIZE and r.start <= end // SIZE * SIZE:
            opened.append(r.blocks[end // SIZE])
    assert inputs.opened.tolist() == opened


def test_buffers_are_reused() -> None:
    builder = InputBuilder(64, SIZE, CPU)
    first = builder.build(Batch([row(3, 5)])).token_ids
    second = builder.build(Batch([row(9, 1, first_block=2)])).token_ids
    assert first.data_ptr() == second.data_ptr()


def test_only_the_last_known_token_draws() -> None:
    assert draws(row(0, 10))
    assert not draws(row(0, 10, rest=1))
    assert not draws(row(0, 10, samples=False))


def test_a_step_that_is_too_large() -> None:
    with pytest.raises(ValueError, match="a step of 33 tokens is larger than the 32 of the runner"):
        InputBuilder(32, SIZE, CPU).build(Batch([row(0, 33)]))


def test_a_table_that_is_too_short() -> None:
    short = row(30, 3)
    del short.blocks[2:]
    with pytest.raises(ValueError, match="row 0 needs 3 blocks and its table has 2"):
        InputBuilder(32, SIZE, CPU).build(Batch([short]))


def test_a_plan_is_made_once() -> None:
    inputs = InputBuilder(32, SIZE, CPU).build(Batch([row(0, 3)]))
    made: list[int] = []

    def build() -> int:
        made.append(1)
        return len(made)

    assert inputs.plan("a", build) == inputs.plan("a", build) == 1
    assert inputs.plan("b", build) == 2
