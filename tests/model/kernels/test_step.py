"""A whole step of the kernels against the decoder written in torch: every family, odd sizes, every number type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.formats import FORMATS, KVLayout
from kvpool.groups import Windows
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.cpu import CpuAttention
from model.attention.reference import ReferenceAttention, clean
from model.batch import Batch, Row
from model.config import ModelConfig, RopeConfig
from model.config_reader import read_config
from model.decoder import Decoder
from model.inputs import InputBuilder, StepInputs
from model.kernels.loaded import Kernels
from model.params import SamplingParams
from model.precision import Precision
from model.source import ModelSource
from model.tensor_shapes import Shape, expected_shapes
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


def inputs(rows: list[tuple[int, int]], windows: Windows = (None,), size: int = 16) -> StepInputs:
    """Each group of layers has blocks of its own."""
    batch = []
    for number, (start, count) in enumerate(rows):
        tokens = [(7 * i * i + 3 * i + 11 * number) % 100 for i in range(start + count)]
        first, *more = (list(range(1 + 4 * n, 5 + 4 * n)) for n in range(number, 3 * len(windows), 3))
        batch.append(Row(tokens, len(tokens), start, count, first, PARAMS, more=more))
    return InputBuilder(128, size, CPU, windows).build(Batch(batch))


def hidden(
    config: ModelConfig,
    weights: WeightStore,
    precision: Precision,
    steps: Steps = STEPS,
    attention: Attention | None = None,
    grouped: bool = False,
    size: int = 16,
) -> tuple[Decoder, torch.Tensor]:
    """Hidden states of all steps, one after the other, over a pool that starts as NaN. `grouped`: layers of one window
    share its blocks."""
    with torch.inference_mode():
        model = Decoder(config, weights, attention or ReferenceAttention(), precision, CPU, 64)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision.kv, size)
        if grouped:
            layout = replace(layout, windows=config.windows)
        windows = layout.groups.windows
        storage = KVStorage(layout, 1 + 12 * len(windows))
        poison(storage)
        randomise(storage.fit)
        out = []
        for rows in steps:
            step = inputs(rows, windows, size)
            if model.reads_unwritten:
                clean(storage, step.opened)
            out.append(model.forward(step, storage).clone())
    return model, torch.cat(out)


def opened(family: str, folder: Path, **changes: Any) -> tuple[ModelConfig, WeightStore]:
    build(family, folder, **changes)
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


class Drawn:
    """Weights of any configuration, the same whenever they are asked for. See `model.weights.WeightStore`."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_shapes(config)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def get(self, name: str, dtype: torch.dtype | None = None, part: tuple[slice, ...] = ()) -> torch.Tensor:
        shape = self._shapes[name]
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))
        drawn = 1 + 0.1 * drawn if len(shape) == 1 else drawn / shape[1] ** 0.5
        return drawn.to(dtype or torch.float32)[part]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_shape(kernels: Kernels, dim: int) -> None:
    """What is written and read, rotated and normed, of heads and blocks of every size."""

    @settings(max_examples=20, deadline=None)
    @given(
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.integers(1, 8),
        size=st.sampled_from([16, 32, 64]),
        kv=st.sampled_from(list(FORMATS)),
        widths=st.tuples(st.integers(17, 90), st.integers(1, 70)),
        window=st.none() | st.integers(1, 50),
        turned=st.sampled_from([0.5, 1.0]),
        normed=st.booleans(),
        rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=3, max_size=3),
    )
    def examples(
        kv_heads: int,
        group: int,
        size: int,
        kv: str,
        widths: tuple[int, int],
        window: int | None,
        turned: float,
        normed: bool,
        rows: list[tuple[int, int]],
    ) -> None:
        config = ModelConfig(
            architecture="LlamaForCausalLM",
            native=True,
            vocab_size=100,
            hidden_size=widths[0],
            intermediate_size=widths[1],
            num_layers=2,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=dim,
            max_position_embeddings=64,
            norm_eps=1e-5,
            layer_types=("full", "full" if window is None else "sliding"),
            rope=RopeConfig(1e4, turned),
            sliding_window=window,
            qk_norm="head" if normed else "none",
            attention_scale=dim**-0.5,
        )
        weights, plain = Drawn(config), Precision(torch.float32, torch.float32, FORMATS[kv])
        steps = [[(0, first) for first, _ in rows], rows]
        _, expected = hidden(config, weights, plain, steps, size=size)
        model, out = hidden(config, weights, replace(plain, kernels=kernels), steps, size=size)
        assert model.fused is not None
        if kv == "float32":
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        else:  # a value between two numbers of 16 bits, or two codes, may get the other one: rarely, but then it shows
            bound = 1e-2 if kv.endswith("16") else 5e-2
            assert float((out - expected).norm() / expected.norm()) < bound

    examples()


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


@pytest.mark.parametrize(("quantization", "off", "size"), [("int8", 0.05, 0.5), ("int4", 0.5, 0.4)])
def test_integers_stay_close(kernels: Kernels, quantization: str, off: float, size: float, tmp_path: Path) -> None:
    config, weights = opened("qwen3", tmp_path)
    plain = Precision(torch.float32, torch.float32, FORMATS["float32"])
    _, expected = hidden(config, weights, plain)
    model, out = hidden(config, weights, replace(plain, kernels=kernels, quantization=quantization))
    assert float((out - expected).norm() / expected.norm()) < off
    wide, _ = hidden(config, weights, replace(plain, kernels=kernels))
    assert model.weight_bytes < size * wide.weight_bytes


@pytest.mark.parametrize(
    ("quantization", "kv"), [(None, "bfloat16"), ("int8", "int8"), ("int4", "bfloat16"), (None, "tq4")]
)
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


SLIDING = {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]}
"""Four groups of one layer, three of which see all."""


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "tq4"])
@pytest.mark.parametrize("compiled", [True, False])
def test_where_blocks_lie_changes_no_bit(kernels: Kernels, kv: str, compiled: bool, tmp_path: Path) -> None:
    config, weights = opened("gemma3", tmp_path, **SLIDING)
    precision = Precision(torch.float32, torch.float32, FORMATS[kv], kernels=kernels if compiled else None)
    _, expected = hidden(config, weights, precision)
    _, out = hidden(config, weights, precision, grouped=True)
    assert torch.equal(out, expected)
    attention = CpuAttention(kernels)
    _, expected = hidden(config, weights, replace(precision, kernels=None), attention=attention)
    _, out = hidden(config, weights, replace(precision, kernels=None), attention=attention, grouped=True)
    assert torch.equal(out, expected)


def test_what_rows_have_in_common_they_have_in_every_group(kernels: Kernels, tmp_path: Path) -> None:
    """Two rows of one beginning, whose blocks differ in one group that sees all: it is read once nowhere."""
    config, weights = opened("gemma3", tmp_path, **SLIDING)
    precision = Precision(torch.float32, torch.float32, FORMATS["float32"], kernels=kernels)
    windows = (None, None, None, 8)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision.kv, 16, config.windows)
    assert layout.groups.windows == windows
    tokens = [(7 * i * i + 3 * i) % 100 for i in range(150)]
    own = [[1 + 10 * group + column for column in range(10)] for group in range(4)]

    def row(tables: list[list[int]]) -> Row:
        return Row(tokens, 150, 149, 1, tables[0], PARAMS, more=tables[1:])

    with torch.inference_mode():
        model = Decoder(config, weights, ReferenceAttention(), precision, CPU, 512)
        storage = KVStorage(layout, 60)
        builder = InputBuilder(200, 16, CPU, windows)
        model.forward(builder.build(Batch([Row(tokens, 150, 0, 150, own[0], PARAMS, more=own[1:])])), storage)
        for parted in (0, 1, 2, None):
            tables = [[*blocks[:9], 51 + group] for group, blocks in enumerate(own)]
            storage.copy([(blocks[9], 51 + group) for group, blocks in enumerate(own)])
            if parted is not None:
                tables[parted] = [40 + 10 - column for column in range(9)] + tables[parted][9:]
                storage.copy([(own[parted][8 - column], block) for column, block in enumerate(tables[parted][:9])])
            alone = model.forward(builder.build(Batch([row(tables)])), storage).clone()
            both = model.forward(builder.build(Batch([row(own), row(tables)])), storage)
            assert torch.equal(both[1], alone[0]), parted
            assert torch.equal(both[0], both[1]) == (parted is None)
