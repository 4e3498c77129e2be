"""The compiled attention against a loop in float64, over any batch; no slot that nobody wrote is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.formats import FORMATS
from model.attention.cpu import CpuAttention
from model.attention.reference import ReferenceAttention
from model.batch import Batch, Row
from model.inputs import InputBuilder
from model.kernels.loaded import Kernels
from tests.model.test_attention_reference import CPU, LAYER, PARAMS, Scene, check, check_given_back, scene

Rows = list[tuple[int, int]]


def attend(kernels: Kernels, made: Scene, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    return CpuAttention(kernels)(
        made.query, made.storage, LAYER, made.inputs, scale=scale, window=window, softcap=softcap
    )


def test_any_batch(kernels: Kernels) -> None:
    @settings(max_examples=80, deadline=None)
    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 150), st.integers(1, 60)) | st.tuples(st.integers(0, 300), st.just(1)),
            min_size=1,
            max_size=6,
        ),
        window=st.none() | st.integers(1, 100),
        softcap=st.none() | st.sampled_from([0.7, 20.0]),
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.integers(1, 8),
        dim=st.sampled_from([16, 64, 80, 128, 256]),
        size=st.sampled_from([16, 32, 64]),
        kv=st.sampled_from(list(FORMATS)),
    )
    def examples(
        rows: Rows,
        window: int | None,
        softcap: float | None,
        kv_heads: int,
        group: int,
        dim: int,
        size: int,
        kv: str,
    ) -> None:
        assert kernels.ops.attends(kv_heads * group, kv_heads, dim)
        check(
            rows,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            dim=dim,
            size=size,
            window=window,
            softcap=softcap,
            kv=kv,
            attention=CpuAttention(kernels),
        )

    examples()


@pytest.mark.parametrize("kv", ["float32", "int8", "k8v4", "tq4"])
@pytest.mark.parametrize(("window", "size"), [(1, 16), (33, 16), (100, 32), (64, 64)])
def test_what_lies_behind_the_window_is_not_missed(kernels: Kernels, window: int, size: int, kv: str) -> None:
    check_given_back(CpuAttention(kernels), window, size, kv)


@pytest.mark.parametrize("kv", ["float32", "int8", "tq4"])
@pytest.mark.parametrize("window", [None, 1500])
def test_long_contexts_are_put_together_from_spans(kernels: Kernels, window: int | None, kv: str) -> None:
    assert kernels.ops.attends(6, 2, 64)
    rows = [(2500, 1), (1023, 1), (1024, 1), (1020, 20), (2040, 30)]
    check(rows, heads=6, kv_heads=2, dim=64, window=window, kv=kv, attention=CpuAttention(kernels))


@pytest.mark.parametrize("kv", ["float32", "k8v4"])
def test_a_row_is_the_same_alone_and_among_others(kernels: Kernels, kv: str) -> None:
    """Also where its context is cut into spans: the cuts depend on the row alone."""
    rows = [(1500, 1), (37, 1), (0, 40), (90, 1)]
    together = scene(rows, heads=6, kv_heads=2, dim=64, kv=kv)
    out = attend(kernels, together, 0.1, None, None)
    for number, (start, count) in enumerate(rows):
        alone = scene([(start, count)], heads=6, kv_heads=2, dim=64, kv=kv)
        first = sum(count for _, count in rows[:number])
        alone.query = together.query[first : first + count]
        table = together.inputs.tables[number][: -(-(start + count) // 16)]
        blocks = torch.from_numpy(table)
        for mine, theirs in ((alone.storage.k, together.storage.k), (alone.storage.v, together.storage.v)):
            mine[LAYER][torch.from_numpy(alone.inputs.tables[0])] = theirs[LAYER][blocks]
        assert torch.equal(attend(kernels, alone, 0.1, None, None), out[first : first + count])


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 90, 1010])
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "tq4"])
def test_a_query_is_the_same_alone_and_in_a_chunk(
    kernels: Kernels, kv: str, window: int | None, softcap: float | None
) -> None:
    """To the last bit, also where the chunk begins and ends in other tiles and spans of keys than the query alone."""
    start, count = 985, 70
    chunk = scene([(3, 5), (start, count)], heads=6, kv_heads=2, dim=64, kv=kv)
    out = attend(kernels, chunk, 0.1, window, softcap)[5:]
    blocks = chunk.inputs.tables[1].tolist()
    for number, position in enumerate(range(start, start + count)):
        row = Row([0] * (position + 1), position + 1, position, 1, blocks, PARAMS)
        alone = replace(
            chunk,
            query=chunk.query[5 + number : 6 + number],
            inputs=InputBuilder(1, 16, CPU).build(Batch([row])),
        )
        assert torch.equal(attend(kernels, alone, 0.1, window, softcap)[0], out[number]), position


def test_rows_that_begin_in_the_same_blocks(kernels: Kernels) -> None:
    """Their common keys are read once for all; each row is the same as alone, to the last bit."""

    @settings(max_examples=30, deadline=None)
    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 250), st.just(1) | st.integers(1, 20), st.integers(0, 8), st.integers(0, 2))
            | st.tuples(st.integers(1000, 2300), st.integers(1, 3), st.integers(55, 140), st.just(0)),
            min_size=2,
            max_size=20,
        ),
        group=st.integers(1, 8),
        dim=st.sampled_from([64, 80]),
        size=st.sampled_from([16, 32, 64]),
        kv=st.sampled_from(["float32", "bfloat16", "int8", "k8v4", "tq4"]),
        window=st.sampled_from([None, None, 100]),
        softcap=st.sampled_from([None, None, 20.0]),
    )
    def examples(
        rows: list[tuple[int, int, int, int]],
        group: int,
        dim: int,
        size: int,
        kv: str,
        window: int | None,
        softcap: float | None,
    ) -> None:
        made = scene(
            [(start, count) for start, count, *_ in rows], heads=2 * group, kv_heads=2, dim=dim, size=size, kv=kv
        )
        batch = []
        for number, (start, count, blocks, of) in enumerate(rows):
            table = made.inputs.tables[number].tolist()[: -(-(start + count) // size)]
            donor = made.inputs.tables[of % len(rows)].tolist()
            lent = min(blocks, start // size, (rows[of % len(rows)][0]) // size)
            batch.append(Row([0] * (start + count), start + count, start, count, donor[:lent] + table[lent:], PARAMS))
        whole = replace(made, inputs=InputBuilder(len(made.query), size, CPU).build(Batch(batch)))
        out = attend(kernels, whole, 0.1, window, softcap)
        assert out.isfinite().all()
        first = 0
        for row in batch:
            alone = replace(
                made,
                query=made.query[first : first + row.count],
                inputs=InputBuilder(row.count, size, CPU).build(Batch([row])),
            )
            assert torch.equal(attend(kernels, alone, 0.1, window, softcap), out[first : first + row.count])
            first += row.count

    examples()


@pytest.mark.parametrize("kv", ["float32", "int8", "tq4"])
def test_a_row_with_broken_numbers_breaks_no_other(kernels: Kernels, kv: str) -> None:
    made = scene([(40, 1), (20, 1), (0, 30)], heads=4, kv_heads=2, dim=64, kv=kv)
    made.query[1, 2, 5] = torch.nan
    out = attend(kernels, made, 0.1, None, None)
    assert out[1, 2].isnan().all()
    out[1, 2] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("kv", ["int8", "k8v4", "tq4"])
def test_broken_keys_and_values_break_their_row_alone(kernels: Kernels, kv: str, plane: str, broken: float) -> None:
    rows = [(40, 1), (20, 1), (0, 30)]
    made = scene(rows, heads=4, kv_heads=2, dim=64, kv=kv)
    for number, vectors in enumerate(torch.ones(2, 3, 2, 64)):
        vectors[1, 0, 7] = broken
        blocks = torch.from_numpy(made.inputs.tables[:, 0])
        if plane == ("keys", "values")[number]:
            getattr(made.storage, plane).write(LAYER, vectors, blocks, torch.full((3,), 3))
    for attention in (CpuAttention(kernels), ReferenceAttention()):
        out = attention(made.query, made.storage, LAYER, made.inputs, scale=0.1)
        assert out[1, :2].isnan().all()
        out[1, :2] = 0
        assert out.isfinite().all()


def test_heads_that_do_not_fit_go_to_the_reference(kernels: Kernels) -> None:
    for heads, kv_heads, dim in ((49, 1, 64), (4, 2, 12), (2, 1, 320)):
        assert not kernels.ops.attends(heads, kv_heads, dim)
        made = scene([(20, 1), (0, 9)], heads=heads, kv_heads=kv_heads, dim=dim)
        expected = ReferenceAttention()(made.query, made.storage, LAYER, made.inputs, scale=0.1)
        assert torch.equal(attend(kernels, made, 0.1, None, None), expected)
