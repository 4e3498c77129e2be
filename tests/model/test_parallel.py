"""A split decoder computes what the whole one does. Its ranks are threads here, and processes in tests/scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.cpu import CpuAttention
from model.attention.reference import ReferenceAttention, clean
from model.config_reader import read_config
from model.decoder import Decoder
from model.kernels.build import load
from model.kernels.loaded import Kernels
from model.layers import Embedding
from model.parallel import Group
from model.precision import Precision
from model.source import ModelSource
from model.weights import open_weights
from tests.kvpool.poison import poison
from tests.loadtest import tiny
from tests.model.conftest import FAMILIES
from tests.model.kernels.test_step import STEPS, inputs
from tests.model.meeting import Member, together
from tests.model.parity import CPU, EXACT, build


def logits(source: ModelSource, precision: Precision, group: Group | None = None) -> torch.Tensor:
    """Of every position of three steps: a prompt, chunks, decoding. On ranks layers of one window share blocks."""
    attention: Attention = ReferenceAttention() if precision.kernels is None else CpuAttention(precision.kernels)
    config = read_config(source)
    model = Decoder(config, open_weights(source, config), attention, precision, CPU, 64, group=group)
    config = model.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision.kv)
    if group is not None:
        layout = replace(layout, windows=config.windows)
    windows = layout.groups.windows
    storage = KVStorage(layout, 1 + 12 * len(windows))
    poison(storage)
    out = []
    for rows in STEPS:
        step = inputs(rows, windows)
        if model.reads_unwritten:
            clean(storage, step.opened)
        out.append(model.logits(model.forward(step, storage)))
    if group is not None:
        bytes_per_layer = 16 * 2 * config.num_kv_heads * config.head_dim * 4
        assert storage.nbytes == storage.num_blocks * layout.groups.size * bytes_per_layer
    return torch.cat(out)


@torch.inference_mode()
def compare(source: ModelSource, size: int, precision: Precision = EXACT, tolerance: float = 2e-5) -> None:
    """`tolerance`: of a logit, as a share of the largest."""
    whole = logits(source, precision)
    split, *others = together(size, lambda member: logits(source, precision, member))
    assert {len(other) for other in others} == {0}
    assert split.shape == whole.shape
    assert float((split - whole).abs().max() / whole.abs().max()) < tolerance
    if tolerance < 1e-3:
        assert torch.equal(split.argmax(-1), whole.argmax(-1))


def folder(family: str, path: Path) -> ModelSource:
    build(family, path)
    return ModelSource("folder", path, "tiny")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, tmp_path: Path) -> None:
    compare(folder(family, tmp_path), 2)


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_more_ranks_than_key_heads(family: str, tmp_path: Path) -> None:
    compare(folder(family, tmp_path), 4)


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 2e-5), ("int8", 0.1), ("int4", 0.5)])
def test_with_kernels(quantization: str | None, tolerance: float, tmp_path: Path) -> None:
    """One by one. In int8 a part of a row has a scale of its own."""
    precision = replace(EXACT, kernels=Kernels(load()), quantization=quantization)
    compare(folder("llama-bias", tmp_path), 2, precision, tolerance)


def test_a_gguf_file_and_an_odd_vocabulary(tmp_path: Path) -> None:
    source = ModelSource("gguf", tiny.write(tmp_path / "tiny.gguf"), "tiny")
    assert read_config(source).vocab_size % 2
    compare(source, 2)


def test_the_ranks_hold_half_each(tmp_path: Path) -> None:
    """Norms and the bias that is added once aside."""
    source = folder("qwen2", tmp_path)
    config = read_config(source)
    narrow = Precision(torch.bfloat16, torch.float32, FORMATS["float32"])

    def held(group: Group | None) -> int:
        model = Decoder(config, open_weights(source, config), ReferenceAttention(), narrow, CPU, 64, group=group)
        norms = [model.norm, *(n for layer in model.layers for n in (layer.before_attention, layer.before_mlp) if n)]
        return model.weight_bytes - sum(norm.nbytes for norm in norms)

    assert together(2, held) == [held(None) // 2] * 2


def test_an_embedding_of_ranks_is_exact() -> None:
    table, ids = torch.randn(7, 3), torch.tensor([6, 0, 3, 4, 3])

    def embedded(member: Member) -> torch.Tensor:
        first, last = ((0, 4), (4, 7))[member.rank]
        return Embedding(table[first:last], 2.0, EXACT, first, member)(ids)

    for found in together(2, embedded):
        assert torch.equal(found, table[ids] * 2.0)
