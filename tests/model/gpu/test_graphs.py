"""Decode steps of whole decoders as graphs would run them: the kernels in the interpreter, over reserved plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.attention.triton import TritonAttention
from model.decoder import Decoder
from model.graphs import Captured
from model.precision import Precision
from tests.kvpool.poison import poison, randomise
from tests.model.kernels.test_step import CPU, inputs, opened
from tests.model.test_graphs import FakeRecorder

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = [
    [(0, 33), (0, 2), (0, 16)],
    [(33, 1), (2, 1), (16, 1)],
    [(34, 1)],
    [(35, 1), (3, 1), (17, 1)],
    [(36, 1), (4, 1)],
]


@pytest.mark.parametrize(("family", "kv"), [("gemma2", "float32"), ("llama", "tq4")])
def test_as_without_graphs(family: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two windows, and with codes. Not a bit differs, for the work is cut alike."""
    monkeypatch.setattr("model.gpu.plan.LEAST", 16)
    config, weights = opened(family, tmp_path)
    attention, recorder = TritonAttention(CPU), FakeRecorder()
    with torch.inference_mode():
        decoder = Decoder(config, weights, attention, Precision(torch.float32, torch.float32, FORMATS[kv]), CPU, 64)
        pools = []
        for _ in range(2):
            layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, FORMATS[kv])
            pool = KVStorage(layout, 13)
            poison(pool)
            randomise(pool.fit)
            pools.append(pool)
        graphs = Captured(decoder, attention, pools[0], [1, 2, 4], 4, recorder)
        for rows in STEPS:
            out, expected = (m.forward(inputs(rows), pool) for m, pool in zip((graphs, decoder), pools, strict=True))
            assert torch.equal(out, expected)
        for part in ("keys", "values"):
            mine, theirs = (getattr(pool, part).tiles[:, 1:].view(torch.uint8) for pool in pools)
            assert torch.equal(mine, theirs)
    assert recorder.runs == [4, 1, 4, 2]
