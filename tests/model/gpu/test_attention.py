"""The attention kernels against a loop in float64: head sizes, blocks, groups, formats, windows, caps, splits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from kvpool.formats import FORMATS
from kvpool.storage import KVStorage
from model.attention.triton import TritonAttention
from model.gpu import plan
from tests.kvpool.poison import poison
from tests.model.gpu.pairs import cases
from tests.model.test_attention_reference import CPU, LAYER, check, naive, scene

# numpy warns where an infinite score or a broken number is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Rows = list[tuple[int, int]]
DECODES: Rows = [(0, 1), (15, 1), (16, 1), (97, 1)]
MIXED: Rows = [(40, 1), (0, 13), (70, 1), (5, 37), (30, 3)]
CHUNK: Rows = [(33, 50)]
ATTENTION = TritonAttention(CPU)


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that nobody wrote stay NaN, those of a last block too, which others must find zeroed."""
    monkeypatch.setattr(KVStorage, "zero", lambda *_: None)


@pytest.mark.parametrize(
    ("rows", "group", "dim", "size", "kv", "window", "softcap"),
    cases(
        [DECODES, MIXED, CHUNK],
        [1, 3, 4, 8],
        [64, 96, 128, 256],
        [16, 32, 64],
        [*FORMATS],
        [None, 7, 40],
        [None, 0.7],
    ),
    ids=str,
)
def test_shapes(
    rows: Rows, group: int, dim: int, size: int, kv: str, window: int | None, softcap: float | None
) -> None:
    kv_heads = 2 if group < 4 else 1
    check(
        rows,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=dim,
        size=size,
        kv=kv,
        window=window,
        softcap=softcap,
        attention=ATTENTION,
    )


@pytest.mark.parametrize(
    ("kv", "window", "group", "dim"),
    cases(["float32", "int8", "tq4"], [None, 150], [1, 3, 4, 8], [64, 96, 128, 256]),
)
def test_split_contexts(kv: str, window: int | None, group: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST", 64)
    rows = [(330, 1), (20, 1), (200, 2), (150, 20)]
    made = scene(rows, heads=2 * group, kv_heads=2, dim=dim, kv=kv)
    works = plan.plan(made.inputs, window, 2, group, ATTENTION.programs).works
    assert all(work.parts > 2 for work in works)
    check(rows, heads=2 * group, kv_heads=2, dim=dim, kv=kv, window=window, attention=ATTENTION)


@pytest.mark.parametrize("kv", ["float32", "tq4"])
def test_a_block_before_the_window_may_be_gone(kv: str) -> None:
    """Its place in the table is the null block's, in which anything may lie."""
    rows = [(100, 1), (70, 20)]
    made = scene(rows, heads=4, kv_heads=2, dim=16, kv=kv)
    expected = naive(made, rows, 0.2, 17, None)
    made.inputs.tables[0, : (100 - 16) // 16] = 0
    made.inputs.tables[1, : (70 - 16) // 16] = 0
    poison(made.storage, 0)
    out = ATTENTION(made.query, made.storage, LAYER, made.inputs, scale=0.2, window=17)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "tq4")])
def test_sixteen_bits(dtype: str, kv: str) -> None:
    made = scene(MIXED, heads=6, kv_heads=2, dim=64, kv=kv)
    kind: Any = getattr(torch, dtype)
    made.query = made.query.to(kind)
    out = ATTENTION(made.query, made.storage, LAYER, made.inputs, scale=0.125)
    assert out.dtype == kind
    expected = naive(made, MIXED, 0.125, None, None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 if kv != "float16" else 2e-3)


def test_queries_as_a_decoder_and_as_transformers_have_them() -> None:
    made = scene(MIXED, heads=4, kv_heads=2, dim=32)
    expected = ATTENTION(made.query, made.storage, LAYER, made.inputs, scale=0.1)
    among_keys = torch.cat([made.query, torch.full_like(made.query, math.nan)], dim=1)[:, :4]
    by_heads = made.query.transpose(0, 1).contiguous().transpose(0, 1)
    for query in (among_keys, by_heads):
        assert not query.is_contiguous()
        assert torch.equal(ATTENTION(query, made.storage, LAYER, made.inputs, scale=0.1), expected)


def test_a_broken_row_stays_alone() -> None:
    made = scene([(20, 1), (9, 1)], heads=2, kv_heads=1, dim=16)
    poison(made.storage, int(made.inputs.tables[0, 0]), LAYER)
    out = ATTENTION(made.query, made.storage, LAYER, made.inputs, scale=0.1)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
