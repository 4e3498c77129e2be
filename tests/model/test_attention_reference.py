"""The reference backend against a loop in float64, one query and one head at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpool.formats import FORMATS, KVLayout
from kvpool.lookup import unseen
from kvpool.plane import Plane
from kvpool.rotation import rotation
from kvpool.storage import KVStorage
from model.attention import reference
from model.attention.base import Attention
from model.attention.reference import ReferenceAttention, clean, plan
from model.batch import Batch, Row
from model.inputs import InputBuilder, StepInputs
from model.params import SamplingParams
from tests.kvpool.poison import poison, randomise

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=1, seed=0)
LAYER = 1


@dataclass(slots=True)
class Scene:
    inputs: StepInputs
    storage: KVStorage
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def scene(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    size: int = 16,
    kv: str = "float32",
    seed: int = 0,
) -> Scene:
    """Rows of (start, count) over a pool in which every slot that nobody wrote is NaN, blocks in no order."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // size) for start, count in rows]
    order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    storage = KVStorage(KVLayout(2, kv_heads, dim, FORMATS[kv], size), sum(needed) + 1)
    poison(storage)
    randomise(storage.fit)
    keys, values, batch = [], [], []
    for (start, count), blocks in zip(rows, needed, strict=True):
        table, order = order[:blocks], order[blocks:]
        length = start + count
        k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
        if storage.fit is None:
            keys.append(stored(storage.keys, k))
        else:  # what moves all scores alike is left out
            fitted = stored(storage.keys, storage.fit.key(LAYER, k), storage.fit.sink(LAYER))
            keys.append(fitted * storage.fit.data[LAYER, 2])
        values.append(stored(storage.values, v))
        positions = torch.arange(length)
        slots = torch.tensor(table)[positions // size] * size + positions % size
        # What lay in the pool before the step, the last block's unwritten slots zeroed as every step leaves them.
        storage.zero(torch.tensor(table[-1:]))
        storage.write(LAYER, k, v, slots)
        batch.append(Row([0] * length, length, start, count, table, PARAMS))
    inputs = InputBuilder(sum(count for _, count in rows), size, CPU).build(Batch(batch))
    query = torch.randn(sum(count for _, count in rows), heads, dim, generator=generator)
    return Scene(inputs, storage, query, keys, values)


def stored(plane: Plane, x: Tensor, sink: Tensor | None = None) -> Tensor:
    """What the pool makes of keys or values, float64, codes turned back."""
    if plane.codec is None:
        return x.to(plane.tiles.dtype).double()
    decoded = plane.codec.decode(*plane.codec.encode(x, sink), sink).double()
    return decoded @ rotation(x.shape[-1], CPU).double() if plane.codec.rotated else decoded


def naive(scene: Scene, rows: list[tuple[int, int]], scale: float, window: int | None, softcap: float | None) -> Tensor:
    out = np.zeros(scene.query.shape)
    token = 0
    for (start, count), keys, values in zip(rows, scene.keys, scene.values, strict=True):
        k, v = keys.numpy(), values.numpy()
        group = scene.query.shape[1] // k.shape[1]
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(scene.query.shape[1]):
                q = scene.query[token, head].double().numpy()
                scores = k[first : position + 1, head // group] @ q * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ v[first : position + 1, head // group]
            token += 1
    return torch.from_numpy(out)


def check(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    kv: str = "float32",
    attention: Attention | None = None,
) -> None:
    """`attention`: by default the reference."""
    made = scene(rows, heads=heads, kv_heads=kv_heads, dim=dim, size=size, kv=kv)
    poison(made.storage, slice(None), 1 - LAYER)
    scale = 1.3 / math.sqrt(dim)
    attend = attention or ReferenceAttention()
    out = attend(made.query, made.storage, LAYER, made.inputs, scale=scale, window=window, softcap=softcap)
    assert out.dtype == made.query.dtype
    torch.testing.assert_close(out.double(), naive(made, rows, scale, window, softcap), rtol=1e-4, atol=1e-5)


def check_given_back(attention: Attention, window: int, size: int, kv: str) -> None:
    """Blocks behind the window are null in the tables and hold what nobody may read: not a bit of a result changes."""
    rows = [(300, 1), (97, 1), (window + 5, 40), (260, 70), (0, 30)]
    made = scene(rows, heads=6, kv_heads=2, dim=64, size=size, kv=kv)

    def attend() -> Tensor:
        return attention(made.query, made.storage, LAYER, made.inputs, scale=0.2, window=window)

    before = attend()
    for number, (start, _) in enumerate(rows):
        gone = made.inputs.tables[number, : unseen(start, size, window)]
        poison(made.storage, torch.from_numpy(gone.copy()))
        gone[:] = 0
    made.inputs.plans.clear()
    assert (made.inputs.tables == 0).sum() > 10
    assert torch.equal(attend(), before)


@pytest.mark.parametrize("kv", ["float32", "tq4"])
@pytest.mark.parametrize(("window", "size"), [(33, 16), (100, 32)])
def test_what_lies_behind_the_window_is_not_missed(window: int, size: int, kv: str) -> None:
    check_given_back(ReferenceAttention(), window, size, kv)


DECODES = [(0, 1), (14, 1), (15, 1), (16, 1), (31, 1), (97, 1), (203, 1)]
MIXED = [(40, 1), (0, 13), (100, 1), (5, 37), (16, 16), (0, 16), (63, 13)]


@pytest.mark.parametrize("rows", [DECODES, MIXED, [(0, 1)], [(0, 70)], [(33, 50)]])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_grouped_heads(rows: list[tuple[int, int]], group: int) -> None:
    check(rows, heads=2 * group, kv_heads=2, dim=64)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("size", [16, 32])
def test_head_and_block_sizes(dim: int, size: int) -> None:
    check(MIXED, heads=6, kv_heads=3, dim=dim, size=size)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
def test_windows(window: int) -> None:
    check(MIXED + DECODES, heads=4, kv_heads=2, dim=16, window=window)


def test_softcap() -> None:
    check(MIXED, heads=4, kv_heads=2, dim=16, softcap=0.7)
    check(MIXED, heads=4, kv_heads=2, dim=16, softcap=2.0, window=20)


@pytest.mark.parametrize("kv", ["bfloat16", "float16"])
def test_sixteen_bit_pool_and_wide_queries(kv: str) -> None:
    check(MIXED, heads=4, kv_heads=2, dim=64, kv=kv)


@pytest.mark.parametrize("dim", [16, 80, 96, 128])
@pytest.mark.parametrize("kv", ["int8", "k8v4", "tq4"])
def test_codes(kv: str, dim: int) -> None:
    check(MIXED, heads=6, kv_heads=2, dim=dim, kv=kv)
    check(MIXED, heads=4, kv_heads=2, dim=dim, kv=kv, size=32, softcap=2.0, window=20)


def test_narrow_queries_over_a_wide_pool() -> None:
    made = scene(MIXED, heads=4, kv_heads=2, dim=64)
    wide = ReferenceAttention()(made.query.bfloat16().float(), made.storage, LAYER, made.inputs, scale=0.1)
    narrow = ReferenceAttention()(made.query.bfloat16(), made.storage, LAYER, made.inputs, scale=0.1)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=7),
    window=st.none() | st.integers(1, 60),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
)
def test_any_batch(rows: list[tuple[int, int]], window: int | None, kv_heads: int, group: int) -> None:
    check(rows, heads=kv_heads * group, kv_heads=kv_heads, dim=8, window=window)


def test_tiles_of_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES", 1 << 10)
    check([(20, 90), (3, 1), (0, 40), (7, 40)], heads=4, kv_heads=2, dim=16)
    check([(20, 90), (3, 1), (0, 40), (7, 40)], heads=4, kv_heads=2, dim=16, window=9)


def test_groups_cover_every_token_once_and_bound_their_padding() -> None:
    rows = [(n, 1) for n in (3, 5, 900, 17, 450, 40, 41, 1000, 1001, 3, 300)] + [(0, 64), (8, 64), (0, 300)]
    made = scene(rows, heads=2, kv_heads=1, dim=8)
    groups = plan(made.inputs, None, 1, 2)
    tokens = torch.cat([group.tokens for group in groups]).sort().values
    assert torch.equal(tokens, torch.arange(len(made.query)))
    contexts = dict(enumerate(np.repeat(made.inputs.contexts, made.inputs.counts).tolist()))
    for group in groups:
        if group.count == 1:
            shortest = min(contexts[int(token)] for token in group.tokens)
            assert group.keys <= 1.25 * (shortest + 16) + 16
    assert len([group for group in groups if group.count == 1]) <= 6


def test_a_window_gathers_only_the_blocks_that_matter() -> None:
    made = scene([(1000, 1), (500, 1)], heads=2, kv_heads=1, dim=8)
    groups = plan(made.inputs, 20, 1, 2)
    assert [group.keys for group in groups] == [32]


def test_the_plan_is_made_once_a_step() -> None:
    made = scene(MIXED, heads=2, kv_heads=1, dim=8)
    attention = ReferenceAttention()
    first = attention(made.query, made.storage, LAYER, made.inputs, scale=1.0)
    made.inputs.tables[:] = 0  # a second plan would read the null block
    assert torch.equal(attention(made.query, made.storage, LAYER, made.inputs, scale=1.0), first)


def test_clean_zeroes_whole_blocks_in_every_layer() -> None:
    for kv in ("float32", "k8v4"):
        storage = KVStorage(KVLayout(3, 2, 16, FORMATS[kv]), 4)
        poison(storage, slice(None))
        clean(storage, torch.tensor([1, 3]))
        for plane in (storage.keys, storage.values):
            assert plane.tiles[:, [1, 3]].eq(0).all()
            assert plane.tiles[:, [0, 2]].ne(0).all(), "NaN too is not 0"
