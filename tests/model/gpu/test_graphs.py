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

PROMPTS = [(0, 20), (0, 1), (0, 3)]
STEPS = [[(20, 1), (1, 1), (3, 1)], [(21, 1), (2, 1)]]


@pytest.mark.parametrize(("family", "kv"), [("gemma2", "float32"), ("llama", "tq4")])
def test_as_without_graphs(family: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two windows, whose layers share pages, and with codes."""
    monkeypatch.setattr("model.gpu.plan.LEAST", 16)
    config, weights = opened(family, tmp_path)
    attention, recorder = TritonAttention(CPU), FakeRecorder()
    with torch.inference_mode():
        decoder = Decoder(config, weights, attention, Precision(torch.float32, torch.float32, FORMATS[kv]), CPU, 64)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, FORMATS[kv], 16, config.windows)
        windows = layout.groups.windows
        pools = KVStorage(layout, 1 + 12 * len(windows)), KVStorage(layout, 1 + 12 * len(windows))
        for pool in pools:
            poison(pool)
            randomise(pool.fit)
        graphs = Captured(decoder, attention, pools[0], [4], 4, recorder)
        decoder.forward(inputs(PROMPTS, windows), pools[0])
        pools[1].data.copy_(pools[0].data)
        for rows in STEPS:
            out = graphs.forward(inputs(rows, windows), pools[0])
            expected = decoder.forward(inputs(rows, windows), pools[1])
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        for part in ("keys", "values"):  # a sum of more rows may round otherwise, and a code be the next one
            mine, theirs = (getattr(pool, part).tiles[:, 1:].view(torch.uint8) for pool in pools)
            assert float((mine != theirs).float().mean()) < (1e-3 if kv == "tq4" else 0.02)
    assert recorder.runs == [4, 4]
