"""Whole steps of a decoder on the kernels for a GPU, against the one in torch: all arrangements of norms, all codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from kvpool.formats import FORMATS
from model.attention.triton import TritonAttention
from model.precision import Precision
from tests.model.conftest import FAMILIES
from tests.model.kernels.test_step import CPU, STEPS, hidden, opened

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# One of each: norms before, behind, both with offset and caps; heads' norms; a part of a head that turns.
CHOSEN = sorted(FAMILIES) if os.environ.get("KERNEL_SHAPES") == "triples" else ["gemma2", "olmo2", "phi3", "qwen3"]


@pytest.mark.parametrize("family", CHOSEN)
def test_every_family(family: str, tmp_path: Path) -> None:
    config, weights = opened(family, tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS["float32"])
    _, expected = hidden(config, weights, plain)
    model, out = hidden(config, weights, plain, STEPS, TritonAttention(CPU))
    assert model.fused is not None
    assert not model.reads_unwritten
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", ["int8", "k8v4", "tq4"])
def test_codes(kv: str, tmp_path: Path) -> None:
    """Written by the kernels as torch writes them. A value between two codes may get the other one."""
    config, weights = opened("llama", tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS[kv])
    _, expected = hidden(config, weights, plain)
    _, out = hidden(config, weights, plain, STEPS, TritonAttention(CPU))
    assert float((out - expected).norm() / expected.norm()) < 2e-2
