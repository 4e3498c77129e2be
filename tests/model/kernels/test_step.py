"""A whole step of the kernels against the decoder written in torch: every family, odd sizes, every number type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.reference import ReferenceAttention, clean
from model.batch import Batch, Row
from model.config import ModelConfig
from model.config_reader import read_config
from model.decoder import Decoder
from model.inputs import InputBuilder, StepInputs
from model.kernels.loaded import Kernels
from model.params import SamplingParams
from model.precision import Precision
from model.source import ModelSource
from model.weights import WeightStore, open_weights
from tests.kvpool.poison import poison, randomise
from tests.model.conftest import FAMILIES
from tests.model.parity import build

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=1, seed=0)
Steps = list[list[tuple[int, int]]]
STEPS: Steps = [[(0, 33), (0, 1), (0, 16)], [(33, 1), (1, 1), (16, 20)], [(34, 1), (2, 9), (36, 1)]]
"""(start, count) of three sequences, step after step."""
SINGLY: Steps = [[(i, 1) if i < end else (end - 1, 1) for end in (35, 11, 37)] for i in range(37)]
"""The same, one token at a time; a sequence that is through computes its last token again."""


def inputs(rows: list[tuple[int, int]]) -> StepInputs:
    batch = []
    for number, (start, count) in enumerate(rows):
        tokens = [(7 * i * i + 3 * i + 11 * number) % 100 for i in range(start + count)]
        blocks = list(range(1 + 4 * number, 5 + 4 * number))
        batch.append(Row(tokens, len(tokens), start, count, blocks, PARAMS))
    return InputBuilder(128, 16, CPU).build(Batch(batch))


def hidden(
    config: ModelConfig,
    weights: WeightStore,
    precision: Precision,
    steps: Steps = STEPS,
    attention: Attention | None = None,
) -> tuple[Decoder, torch.Tensor]:
    """Hidden states of all steps, one after the other, over a pool that starts as NaN."""
    with torch.inference_mode():
        model = Decoder(config, weights, attention or ReferenceAttention(), precision, CPU, 64)
        storage = KVStorage(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision.kv), 13)
        poison(storage)
        randomise(storage.fit)
        out = []
        for rows in steps:
            step = inputs(rows)
            if model.reads_unwritten:
                clean(storage, step.opened)
            out.append(model.forward(step, storage).clone())
    return model, torch.cat(out)


def opened(family: str, folder: Path) -> tuple[ModelConfig, WeightStore]:
    build(family, folder)
    source = ModelSource("folder", folder, "tiny")
    config = read_config(source)
    return config, open_weights(source, config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(kernels: Kernels, family: str, tmp_path: Path) -> None:
    config, weights = opened(family, tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS["float32"])
    _, expected = hidden(config, weights, plain)
    model, out = hidden(config, weights, replace(plain, kernels=kernels))
    assert model.fused is not None
    assert not model.reads_unwritten
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_sixteen_bits(kernels: Kernels, stored: torch.dtype, kv: str, tmp_path: Path) -> None:
    config, weights = opened("llama", tmp_path)
    plain = Precision(stored, torch.float32, FORMATS[kv])
    _, expected = hidden(config, weights, plain)
    _, out = hidden(config, weights, replace(plain, kernels=kernels))
    # A value that two ways round differently into the pool differs by one step of its type. Where the processor
    # multiplies bfloat16, every activation is rounded.
    rounds = stored == torch.bfloat16 and kernels.isa in ("avx512bf16", "emulated")
    assert float((out - expected).norm() / expected.norm()) < (5e-2 if rounds else 1e-2)


@pytest.mark.parametrize("kv", ["int8", "k8v4", "tq4"])
def test_codes(kernels: Kernels, kv: str, tmp_path: Path) -> None:
    """Written by the kernels as torch writes them. A value between two codes may get the other one."""
    config, weights = opened("llama", tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS[kv])
    _, expected = hidden(config, weights, plain)
    model, out = hidden(config, weights, replace(plain, kernels=kernels))
    assert model.fused is not None
    assert float((out - expected).norm() / expected.norm()) < 2e-2


def test_int8_stays_close(kernels: Kernels, tmp_path: Path) -> None:
    config, weights = opened("qwen3", tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS["float32"])
    _, expected = hidden(config, weights, plain)
    model, out = hidden(config, weights, replace(plain, kernels=kernels, quantization="int8"))
    assert float((out - expected).norm() / expected.norm()) < 0.05
    wide, _ = hidden(config, weights, replace(plain, kernels=kernels))
    assert model.weight_bytes < 0.5 * wide.weight_bytes


@pytest.mark.parametrize(("quantization", "kv"), [(None, "bfloat16"), ("int8", "int8"), (None, "tq4")])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_token_is_the_same_in_any_step(
    kernels: Kernels, family: str, quantization: str | None, kv: str, tmp_path: Path
) -> None:
    """To the last bit, in 16 bits: whatever it is computed with, and however its prompt was cut."""
    config, weights = opened(family, tmp_path)
    precision = Precision(torch.bfloat16, torch.float32, FORMATS[kv], kernels, quantization)
    ways = []
    for steps in (STEPS, SINGLY):
        _, out = hidden(config, weights, precision, steps)
        states = iter(out)
        places = [(n, start + i) for rows in steps for n, (start, count) in enumerate(rows) for i in range(count)]
        ways.append({place: next(states) for place in places})
    assert ways[0].keys() == ways[1].keys()
    assert all(torch.equal(ways[0][place], ways[1][place]) for place in ways[0])
