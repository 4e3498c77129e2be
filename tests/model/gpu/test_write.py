"""Norms of heads, rotary embedding, codes and places in the pool, against what a decoder does in torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from kvpool.formats import FORMATS, KVLayout
from kvpool.plane import Plane
from kvpool.rotation import rotation
from kvpool.storage import KVStorage
from model.batch import Batch, Row
from model.gpu.write import writing
from model.inputs import InputBuilder, StepInputs
from model.layers import RMSNorm
from model.params import SamplingParams
from model.rope import rotate
from tests.kvpool.poison import poison, randomise
from tests.model.gpu.pairs import cases
from tests.model.test_attention_reference import CPU

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PARAMS = SamplingParams(max_tokens=1, seed=0)
KV_HEADS, LAYER = 2, 1


@dataclass(slots=True)
class Written:
    query: Tensor
    storage: KVStorage
    inputs: StepInputs


def pool(kv: str, dim: int, size: int) -> KVStorage:
    storage = KVStorage(KVLayout(2, KV_HEADS, dim, FORMATS[kv], size), 6)
    poison(storage)
    randomise(storage.fit)
    return storage


def both(
    qkv: Tensor, kv: str, size: int, norm: RMSNorm | None, cos_sin: tuple[Tensor, Tensor] | None
) -> tuple[Written, Written]:
    """By the kernel, and by torch."""
    tokens, _, dim = qkv.shape
    chunk = tokens - 1
    rows = [Row([0] * 20, 20, 19, 1, [3, 5], PARAMS), Row([0] * chunk, chunk, 0, chunk, [2, 4], PARAMS)]
    inputs = InputBuilder(tokens, size, CPU).build(Batch(rows))
    mine, theirs = pool(kv, dim, size), pool(kv, dim, size)
    heads = qkv.shape[1] - 2 * KV_HEADS
    query = torch.empty(tokens, heads, dim)
    writing(qkv, query, mine, LAYER, inputs, norm=norm, cos_sin=cos_sin).run()

    qk, v = qkv[:, : heads + KV_HEADS], qkv[:, heads + KV_HEADS :]
    qk = norm(qk) if norm is not None else qk
    qk = rotate(qk, *cos_sin) if cos_sin is not None else qk
    theirs.write_at(LAYER, qk[:, heads:], v, inputs.blocks, inputs.offsets)
    expected = qk[:, :heads]
    if theirs.fit is not None:
        grouped = expected.reshape(tokens, KV_HEADS, -1, dim)
        expected = theirs.fit.query(LAYER, grouped).reshape(tokens, heads, dim) @ rotation(dim, CPU).T
    return Written(query, mine, inputs), Written(expected, theirs, inputs)


def read(pool: KVStorage, name: str, inputs: StepInputs) -> Tensor:
    """What lies where the step wrote, [tokens, kv_heads, head_dim]."""
    plane: Plane = getattr(pool, name)
    sink = pool.fit.sink(LAYER) if pool.fit is not None and name == "keys" else None
    tiles = (inputs.blocks[:, None] * KV_HEADS + torch.arange(KV_HEADS)).flatten()
    found = plane.read(LAYER, tiles, sink).view(len(inputs.blocks), KV_HEADS, plane.block_size, plane.head_dim)
    return found[torch.arange(len(found)), :, inputs.offsets]


@pytest.mark.parametrize(
    ("kv", "dim", "size", "group", "rotary", "normed"),
    cases([*FORMATS], [64, 96, 128, 256], [16, 32, 64], [1, 3, 4, 8], [0.0, 0.5, 1.0], [False, True]),
)
def test_shapes(kv: str, dim: int, size: int, group: int, rotary: float, normed: bool) -> None:
    generator = torch.Generator().manual_seed(dim)
    tokens, heads = 23, group * KV_HEADS
    qkv = torch.randn(tokens, heads + 2 * KV_HEADS, dim, generator=generator)
    weight = torch.rand(heads + KV_HEADS, dim, generator=generator) + 0.5
    norm = RMSNorm(weight, 1e-5, 0.0, "scale_then_cast", torch.float32)
    cos_sin = None
    if rotary:
        angles = torch.rand(tokens, 1, int(dim * rotary) // 2, generator=generator) * 6
        cos_sin = angles.cos(), angles.sin()
    mine, theirs = both(qkv, kv, size, norm if normed else None, cos_sin)
    torch.testing.assert_close(mine.query, theirs.query, rtol=1e-4, atol=1e-4)
    for name in ("keys", "values"):
        plane: Plane = getattr(mine.storage, name)
        found, expected = read(mine.storage, name, mine.inputs), read(theirs.storage, name, mine.inputs)
        # Between two codes, or two numbers of 16 bits, one may get the one and one the other; and the interpreter cuts
        # off what bfloat16 has no bits for, where others round.
        step = 2**-7 if kv == "bfloat16" else 1e-3
        off = (found - expected).abs() > step * expected.abs().amax(-1, keepdim=True)
        assert float(off.float().mean()) < 2e-3
        assert kv not in ("float32", "bfloat16") or not off.any()
        assert float((found - expected).abs().max()) <= 0.2 * float(expected.abs().max())
        others = torch.tensor([block for block in range(1, 6) if block not in mine.inputs.blocks])
        for untouched in (plane.tiles[1 - LAYER, 1:], plane.tiles[LAYER, others]):
            assert (untouched.isnan() if plane.codec is None else untouched.eq(255)).all()


def test_zeros_and_broken_numbers() -> None:
    for kv in ("int8", "tq4"):
        qkv = torch.randn(5, 4 + 2 * KV_HEADS, 32, generator=torch.Generator().manual_seed(0))
        qkv[0, 4:] = 0
        qkv[1, 4:, 3] = torch.nan
        qkv[2, 4:, 9] = -torch.inf
        qkv[3, 4:] *= 1e12
        mine, theirs = both(qkv, kv, 16, None, None)
        for name in ("keys", "values"):
            found = read(mine.storage, name, mine.inputs)
            expected = read(theirs.storage, name, mine.inputs)
            assert torch.equal(found.isnan(), expected.isnan())
            assert found[1:3].isnan().all()
            ok = ~expected.isnan()
            torch.testing.assert_close(found[ok], expected[ok], rtol=2e-3, atol=2e-3)
