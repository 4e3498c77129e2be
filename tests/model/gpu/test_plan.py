"""Items of work: together they are all that the rows of a step see, and no more than was promised."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import Batch, Row
from model.gpu.plan import COLUMNS, STEP, WAVES, Plan, Reserved, plan
from model.inputs import InputBuilder, StepInputs
from model.params import SamplingParams
from tests.model.test_attention_reference import CPU

PARAMS = SamplingParams(max_tokens=1, seed=0)


def built(rows: list[tuple[int, int]]) -> StepInputs:
    batch = [
        Row([0] * (start + count), start + count, start, count, list(range(1, 2 + (start + count) // 16)), PARAMS)
        for start, count in rows
    ]
    return InputBuilder(sum(count for _, count in rows), 16, CPU).build(Batch(batch))


def planned(rows: list[tuple[int, int]], window: int | None, kv_heads: int, group: int, programs: int) -> Plan:
    return plan(built(rows), window, kv_heads, group, programs)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3000), st.just(1) | st.integers(1, 5) | st.integers(1, 200)), min_size=1, max_size=12
    ),
    window=st.none() | st.integers(1, 500),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 3, 4, 8, 24]),
    programs=st.sampled_from([4, 132]),
)
def test_items_are_what_rows_see(
    rows: list[tuple[int, int]], window: int | None, kv_heads: int, group: int, programs: int
) -> None:
    made = planned(rows, window, kv_heads, group, programs)
    assert made.row_starts.tolist() == np.cumsum([0, *(count for _, count in rows)]).tolist()
    assert made.starts.tolist() == [start for start, _ in rows]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for work in made.works:
        queries = work.rows // group
        assert queries >= 1
        numbers: list[int] = []
        tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for row, first, begin, end, part in work.items.tolist():
            assert begin % STEP == 0
            assert begin < end
            tiles.setdefault((row, first), []).append((begin, end, part))
            numbers += [part] * (part >= 0)
        assert sorted(numbers) == list(range(work.parts))
        assert work.items.shape[1] == COLUMNS
        assert len(work.items) <= len(tiles) + WAVES * programs / kv_heads
        merges = {(row, first): (part, count) for row, first, part, count in work.merges.tolist()}
        assert {tile for tile, pieces in tiles.items() if len(pieces) > 1} == set(merges)
        for (row, first), pieces in tiles.items():
            pieces.sort()
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
            if len(pieces) > 1:
                part, count = merges[row, first]
                assert [piece[2] for piece in pieces] == list(range(part, part + count))
            start, count = rows[row]
            last = min(first + queries, count)
            assert first % queries == 0
            assert pieces[-1][1] == start + last
            lowest = 0 if window is None else max(0, start + first - window + 1)
            assert pieces[0][0] == lowest // STEP * STEP if window else pieces[0][0] == 0
            for query in range(first, last):
                seen.setdefault((row, query), []).append((first, last))
    assert all(len(tiles) == 1 for tiles in seen.values())
    assert len(seen) == sum(count for _, count in rows)


def test_a_full_batch_is_not_split_and_a_long_context_is() -> None:
    (work,) = planned([(1023, 1)] * 256, None, 8, 4, 132).works
    assert (len(work.items), work.parts) == (256, 0)
    (work,) = planned([(40_000, 1), *[(100, 1)] * 40], None, 8, 4, 132).works
    assert work.parts > 20
    assert set(work.items[:, 0][work.items[:, 4] >= 0].tolist()) == {0}


def test_drafts_fit_the_small_tile() -> None:
    works = planned([(50, 1), (20, 4), (10, 5), (0, 60)], None, 2, 4, 132).works
    assert [(work.rows, sorted(set(work.items[:, 0].tolist()))) for work in works] == [(16, [0, 1]), (64, [2, 3])]


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 500),
    kv_heads=st.sampled_from([1, 2, 8, 500]),
    group=st.sampled_from([1, 3, 24]),
    programs=st.sampled_from([4, 132]),
)
def test_there_is_room_for_any_plan(
    starts: list[int], window: int | None, kv_heads: int, group: int, programs: int
) -> None:
    """Whatever a step before left; what is over writes nothing: no keys, and a query that row 0 has not."""
    reserved = Reserved(13, 190, window, kv_heads, group, programs, CPU)
    for rows in ([(3000, 1)] * 13, [(start, 1) for start in starts]):
        inputs = built(rows)
        expected = plan(inputs, window, kv_heads, group, programs)
        reserved.fill(inputs)
        made, (work,), (room,) = reserved.plan, expected.works, reserved.plan.works
        assert room.rows == work.rows
        assert room.parts >= work.parts
        for whole, part, spare in (
            (room.items, work.items, [0, 1, 0, 0, -1]),
            (room.merges, work.merges, [0, 1, 0, 0]),
        ):
            assert whole[: len(part)].tolist() == part.tolist()
            assert whole[len(part) :].tolist() == [spare] * (len(whole) - len(part))
        assert made.row_starts[: len(rows) + 1].tolist() == expected.row_starts.tolist()
        assert made.starts[: len(rows)].tolist() == expected.starts.tolist()
        assert made.gone[: len(rows)].tolist() == expected.gone.tolist()
        assert made.width.tolist() == expected.width.tolist()
        assert made.tables.flatten()[: expected.tables.numel()].tolist() == expected.tables.flatten().tolist()
    assert all(
        tensor.data_ptr() % 16 == 0
        for tensor in (made.starts, made.gone, made.width, made.tables, room.items, room.merges)
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 90)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 300),
)
def test_tables_have_what_is_seen_and_little_more(rows: list[tuple[int, int]], window: int | None) -> None:
    """A kernel finds the block of a position at row · width - gone + position / block_size."""
    inputs = built(rows)
    made = plan(inputs, window, 2, 1, 4)
    flat, width, size = made.tables.flatten().tolist(), int(made.width), inputs.block_size
    for row, (start, count) in enumerate(rows):
        for position in range(0 if window is None else max(0, start - window + 1), start + count):
            found = flat[row * width - int(made.gone[row]) + position // size]
            assert found == inputs.tables[row, position // size]
    longest = max(count for _, count in rows)
    assert window is None or width <= -(-(window + longest) // size) + 1
